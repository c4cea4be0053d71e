/* ddl.h: distributed deep-learning communication in one C header.
 *
 * >>do_this
 * In one C file of the program:
 *
 *     #define DDL_IMPLEMENTATION
 *     #include "ddl.h"
 *
 * and #include "ddl.h" wherever else it is used, in C11 or C++17. Include it first in the file with the two lines, or
 * compile that file with -D_GNU_SOURCE. Linux, 64 bit, gcc or clang; link with -lpthread -ldl where libc wants it.
 * A C++ program puts the two lines into a file ddl.c and compiles that as C. The smallest complete program is
 * examples/hello.c:
 *
 *     #define DDL_IMPLEMENTATION
 *     #include "ddl.h"
 *     #include <stdio.h>
 *
 *     int main(void) {
 *         ddl_context *context;
 *         if (ddl_init(NULL, &context) != DDL_OK) {
 *             return 1;
 *         }
 *         ddl_group *world = ddl_world(context);
 *         float value[1] = {(float)ddl_rank(world)};
 *         if (ddl_all_reduce(world, DDL_ARRAY(value), DDL_ARRAY(value), DDL_SUM) != DDL_OK) {
 *             fprintf(stderr, "%s\n", ddl_error(context));
 *             return 1;
 *         }
 *         printf("rank %d of %d: the sum is %g\n", ddl_rank(world), ddl_size(world), (double)value[0]);
 *         return ddl_finalize(&context) == DDL_OK ? 0 : 1;
 *     }
 *
 *     cc -O2 -o hello hello.c -lpthread -ldl
 *     ddlrun -n 4 ./hello                                        on this machine
 *     torchrun --no-python --nnodes 2 --nproc-per-node 4 ...     on several; mpirun and srun do as well
 *
 * Contents: grep '>>' ddl.h. Public: status handles tensor op context group request p2p coll collective
 * optimizer, then the plugin ABI, then the implementation.
 *
 * >>options
 * Macros that are defined before the #include. "Everywhere": alike in all files. "Implementation file only": in the
 * file with DDL_IMPLEMENTATION, others do not look at it. No option changes the layout of a public struct.
 *
 *     DDL_IMPLEMENTATION   implementation file only   the functions are compiled here, and not only declared
 *     DDL_STATIC           everywhere (one file)      all functions are static: the program is one file, or each
 *                                                     file has a ddl of its own
 *     DDL_NAMESPACE        everywhere                 -DDDL_NAMESPACE=mylib_ puts mylib_ before all public functions:
 *                                                     two libraries in one program can each bring a ddl
 *     DDL_API              everywhere                 what stands before each declaration; for export attributes
 *     DDL_NO_PLUGINS       implementation file only   nothing is loaded at run time; no dlopen
 *     DDL_PLUGIN_DIR       implementation file only   a folder, as a string, where plugins are looked for last
 *
 * >>environment
 * Read once by ddl_init. A member of ddl_config that is set wins over its variable. Empty counts as unset. A DDL_
 * variable that nobody reads is warned of.
 *
 *     variable             default   meaning
 *     DDL_LOG              warn      what to log: none, warn, info or debug
 *     DDL_RENDEZVOUS                 tcp://host:port or file:///shared/folder, instead of MASTER_ADDR and MASTER_PORT
 *     DDL_JOB                        a name that tells jobs on one host, port or folder apart
 *     DDL_SECRET_FD                  a descriptor to read the job secret from; ddlrun sets it
 *     DDL_SECRET_FILE                a file with the job secret (16 bytes or more), readable by its owner alone
 *     DDL_SECRET                     the job secret itself
 *     DDL_INTERFACE                  the network interface to bind and to advertise
 *     DDL_ADVERTISE                  an address that peers reach this rank at, when it is not the bound one
 *     DDL_PORT_RANGE                 ports that ranks listen on, as 20000-20100; any free port without it
 *     DDL_TRANSPORTS                 transports in order of preference, as shm,tcp; all that load without it
 *     DDL_PLUGINS                    plugins that must load: names or absolute paths, separated by commas
 *     DDL_PLUGIN_PATH                folders to find plugins in, separated by colons
 *     DDL_SELF_TEST         1        0: transports of plugins are used without having been tried out
 *     DDL_ALGO             auto      algorithms, as ring or all_reduce=ring,broadcast=tree
 *     DDL_TUNE_CACHE                 a file that keeps the measured latency and bandwidth for later runs
 *     DDL_TIMEOUT_MS       300000    deadline of an operation; -1: none
 *     DDL_INIT_TIMEOUT_MS  60000     deadline of ddl_init
 *     DDL_STALL_MS         10000     a wait this long is reported; -1: never
 *     DDL_PROGRESS_THREAD  0         1: operations progress on a thread of their own
 *     DDL_DETERMINISTIC    0         1: reduce in rank order whatever the algorithm and transport
 *     DDL_SPREAD           1         0: ranks that wait on one core stay there while another core is free
 *     DDL_HOST_ID                    ranks with equal text count as on one host; for tests
 *     DDL_CHECK                      payload: checksums of all data, not only of headers
 *
 * Rank and world come from the first of these that is set: RANK and WORLD_SIZE (torchrun, ddlrun), Open MPI's, PMI's
 * (MPICH), Slurm's. MASTER_ADDR and MASTER_PORT say where rank 0 is. With none of them the world is this process alone.
 *
 * >>glossary
 *     rank         a member of a job, numbered from 0; and its number in a group
 *     world        the group of all ranks
 *     context      what one rank holds: ddl_init gives it. A process may hold several, for ranks that are threads
 *     group        an ordered set of ranks with messages of its own; NCCL and MPI say communicator
 *     operation    one collective or one message; a request is the handle of one that was started
 *     eager        small messages go out at once; the receiver keeps them if it has not asked yet
 *     rendezvous   of messages: large ones wait until the receiver has asked. Of jobs: where ranks find each other
 *     plan         a collective as a list of steps (send, receive, reduce, copy) that one rank takes
 *     fence        a plan's first steps when it needs them: nobody writes results before all have made the same call
 *     transport    what carries messages: TCP is built in, others are plugins
 *     epoch        counts how often a group was made anew after deaths; frames of other epochs are dropped
 *     job secret   bytes that all ranks of a job share and prove to each other before anything else is read
 *
 * >>guarantees
 * Threads. Any thread may call any function on any context at any time, but ddl_finalize: one thread, after the others
 * are done. One context has one lock; it is not held while a thread sleeps. One collective after the other on one group
 * is the caller's duty; different groups and point-to-point are independent. After fork the child gets DDL_ERR_FORK.
 *
 * Order. Messages between two ranks of a group are received in the order they were sent, per tag. Collectives of a
 * group are matched by the order of the calls. Between groups there is no order. Progress is made inside calls that
 * wait, test or start, and in ddl_progress; on a thread as well with progress_thread.
 *
 * Ownership. Buffers are the caller's. ddl reads and writes them from the start of an operation until the wait or test
 * that reports its end, and never after. Config strings, rank lists and count arrays are copied. Who creates a handle
 * frees it. Nothing is allocated when an operation is repeated with the same arguments.
 *
 * Failure. No call exits, aborts, prints (but the log), installs a signal handler or changes the environment. Every
 * wait ends: by success, by its deadline, by a death, by ddl_abort. A wrong argument changes nothing. Ranks that make
 * different calls all get DDL_ERR_MISMATCH, with both calls spelled out and buffers untouched; a rank whose own part had
 * already ended (a root that has sent all, a rank of an all_to_allv whose own lengths are right) learns of it at its
 * next call on the group. A rank that died is named by DDL_ERR_PEER on every rank of its groups, all with the same first
 * cause. A collective that fails breaks its group: later ones return the same, until ddl_group_shrink makes a group of
 * those who are left. Groups without the dead rank go on. What a failed operation has written to its output is not
 * defined, except after a mismatch.
 *
 * Numerics. All ranks get the same bits. The same group, data, counts and algorithm give the same bits on every run;
 * auto chooses by measured figures, so pin it with DDL_ALGO or DDL_TUNE_CACHE, or set deterministic: then the result is
 * that of ((x0 + x1) + x2) + ... on any transport. f16 and bf16 are accumulated in f32 and rounded once per step.
 * Integers wrap around.
 *
 * Security. In: with a job secret both ends of every connection prove it (HMAC-SHA256, fresh nonces, server first)
 * before anything else is parsed; without one, only processes of the same user on the same host are let in. What
 * strangers can make a rank hold is bounded in number, bytes and time. No size from the wire is believed before it is
 * checked. The secret is in no log, error or child's environment of ours. Out: data is not encrypted, so whoever can
 * read or change packets on the wire can read or change it; a member that holds the secret is trusted; a plugin is
 * trusted code; root is trusted. Use a private network or a tunnel across untrusted ones. */

/* Made by amalgamate.py from src/. Do not edit: change src/ and run it again. */
#if defined(DDL_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1 /* memfd, pidfd, accept4: this needs Linux */
#endif

#ifndef DDL_H
#define DDL_H

#include <stddef.h>
#include <stdint.h>

/* DDL_NAMESPACE: a prefix for all public functions, so that two libraries in one program can each bring a ddl. */
#ifdef DDL_NAMESPACE
#define DDL__PASTE2(a, b) a##b
#define DDL__PASTE(a, b) DDL__PASTE2(a, b)
#define ddl_abort DDL__PASTE(DDL_NAMESPACE, ddl_abort)
#define ddl_agree DDL__PASTE(DDL_NAMESPACE, ddl_agree)
#define ddl_all_gather DDL__PASTE(DDL_NAMESPACE, ddl_all_gather)
#define ddl_all_gatherv DDL__PASTE(DDL_NAMESPACE, ddl_all_gatherv)
#define ddl_all_reduce DDL__PASTE(DDL_NAMESPACE, ddl_all_reduce)
#define ddl_all_reduce_many DDL__PASTE(DDL_NAMESPACE, ddl_all_reduce_many)
#define ddl_all_reduce_scalar DDL__PASTE(DDL_NAMESPACE, ddl_all_reduce_scalar)
#define ddl_all_to_all DDL__PASTE(DDL_NAMESPACE, ddl_all_to_all)
#define ddl_all_to_allv DDL__PASTE(DDL_NAMESPACE, ddl_all_to_allv)
#define ddl_barrier DDL__PASTE(DDL_NAMESPACE, ddl_barrier)
#define ddl_batch DDL__PASTE(DDL_NAMESPACE, ddl_batch)
#define ddl_broadcast DDL__PASTE(DDL_NAMESPACE, ddl_broadcast)
#define ddl_cancel DDL__PASTE(DDL_NAMESPACE, ddl_cancel)
#define ddl_collective_init DDL__PASTE(DDL_NAMESPACE, ddl_collective_init)
#define ddl_dtype_bytes DDL__PASTE(DDL_NAMESPACE, ddl_dtype_bytes)
#define ddl_dtype_name DDL__PASTE(DDL_NAMESPACE, ddl_dtype_name)
#define ddl_error DDL__PASTE(DDL_NAMESPACE, ddl_error)
#define ddl_estimate DDL__PASTE(DDL_NAMESPACE, ddl_estimate)
#define ddl_exscan DDL__PASTE(DDL_NAMESPACE, ddl_exscan)
#define ddl_feature DDL__PASTE(DDL_NAMESPACE, ddl_feature)
#define ddl_finalize DDL__PASTE(DDL_NAMESPACE, ddl_finalize)
#define ddl_flight_record DDL__PASTE(DDL_NAMESPACE, ddl_flight_record)
#define ddl_gather DDL__PASTE(DDL_NAMESPACE, ddl_gather)
#define ddl_gatherv DDL__PASTE(DDL_NAMESPACE, ddl_gatherv)
#define ddl_group_context DDL__PASTE(DDL_NAMESPACE, ddl_group_context)
#define ddl_group_create DDL__PASTE(DDL_NAMESPACE, ddl_group_create)
#define ddl_group_duplicate DDL__PASTE(DDL_NAMESPACE, ddl_group_duplicate)
#define ddl_group_free DDL__PASTE(DDL_NAMESPACE, ddl_group_free)
#define ddl_group_name DDL__PASTE(DDL_NAMESPACE, ddl_group_name)
#define ddl_group_set DDL__PASTE(DDL_NAMESPACE, ddl_group_set)
#define ddl_group_shrink DDL__PASTE(DDL_NAMESPACE, ddl_group_shrink)
#define ddl_group_split DDL__PASTE(DDL_NAMESPACE, ddl_group_split)
#define ddl_group_translate DDL__PASTE(DDL_NAMESPACE, ddl_group_translate)
#define ddl_iall_gather DDL__PASTE(DDL_NAMESPACE, ddl_iall_gather)
#define ddl_iall_gatherv DDL__PASTE(DDL_NAMESPACE, ddl_iall_gatherv)
#define ddl_iall_reduce DDL__PASTE(DDL_NAMESPACE, ddl_iall_reduce)
#define ddl_iall_reduce_many DDL__PASTE(DDL_NAMESPACE, ddl_iall_reduce_many)
#define ddl_iall_to_all DDL__PASTE(DDL_NAMESPACE, ddl_iall_to_all)
#define ddl_iall_to_allv DDL__PASTE(DDL_NAMESPACE, ddl_iall_to_allv)
#define ddl_ibarrier DDL__PASTE(DDL_NAMESPACE, ddl_ibarrier)
#define ddl_ibroadcast DDL__PASTE(DDL_NAMESPACE, ddl_ibroadcast)
#define ddl_iexscan DDL__PASTE(DDL_NAMESPACE, ddl_iexscan)
#define ddl_igather DDL__PASTE(DDL_NAMESPACE, ddl_igather)
#define ddl_igatherv DDL__PASTE(DDL_NAMESPACE, ddl_igatherv)
#define ddl_init DDL__PASTE(DDL_NAMESPACE, ddl_init)
#define ddl_iprobe DDL__PASTE(DDL_NAMESPACE, ddl_iprobe)
#define ddl_irecv DDL__PASTE(DDL_NAMESPACE, ddl_irecv)
#define ddl_ireduce DDL__PASTE(DDL_NAMESPACE, ddl_ireduce)
#define ddl_ireduce_scatter DDL__PASTE(DDL_NAMESPACE, ddl_ireduce_scatter)
#define ddl_ireduce_scatterv DDL__PASTE(DDL_NAMESPACE, ddl_ireduce_scatterv)
#define ddl_iscan DDL__PASTE(DDL_NAMESPACE, ddl_iscan)
#define ddl_iscatter DDL__PASTE(DDL_NAMESPACE, ddl_iscatter)
#define ddl_iscatterv DDL__PASTE(DDL_NAMESPACE, ddl_iscatterv)
#define ddl_isend DDL__PASTE(DDL_NAMESPACE, ddl_isend)
#define ddl_op_create DDL__PASTE(DDL_NAMESPACE, ddl_op_create)
#define ddl_op_create_scaled_sum DDL__PASTE(DDL_NAMESPACE, ddl_op_create_scaled_sum)
#define ddl_op_free DDL__PASTE(DDL_NAMESPACE, ddl_op_free)
#define ddl_part DDL__PASTE(DDL_NAMESPACE, ddl_part)
#define ddl_probe DDL__PASTE(DDL_NAMESPACE, ddl_probe)
#define ddl_progress DDL__PASTE(DDL_NAMESPACE, ddl_progress)
#define ddl_rank DDL__PASTE(DDL_NAMESPACE, ddl_rank)
#define ddl_recv DDL__PASTE(DDL_NAMESPACE, ddl_recv)
#define ddl_reduce DDL__PASTE(DDL_NAMESPACE, ddl_reduce)
#define ddl_reduce_scatter DDL__PASTE(DDL_NAMESPACE, ddl_reduce_scatter)
#define ddl_reduce_scatterv DDL__PASTE(DDL_NAMESPACE, ddl_reduce_scatterv)
#define ddl_request_free DDL__PASTE(DDL_NAMESPACE, ddl_request_free)
#define ddl_scan DDL__PASTE(DDL_NAMESPACE, ddl_scan)
#define ddl_scatter DDL__PASTE(DDL_NAMESPACE, ddl_scatter)
#define ddl_scatterv DDL__PASTE(DDL_NAMESPACE, ddl_scatterv)
#define ddl_send DDL__PASTE(DDL_NAMESPACE, ddl_send)
#define ddl_send_recv DDL__PASTE(DDL_NAMESPACE, ddl_send_recv)
#define ddl_size DDL__PASTE(DDL_NAMESPACE, ddl_size)
#define ddl_start DDL__PASTE(DDL_NAMESPACE, ddl_start)
#define ddl_stats_get DDL__PASTE(DDL_NAMESPACE, ddl_stats_get)
#define ddl_status_name DDL__PASTE(DDL_NAMESPACE, ddl_status_name)
#define ddl_status_text DDL__PASTE(DDL_NAMESPACE, ddl_status_text)
#define ddl_tensor_1d DDL__PASTE(DDL_NAMESPACE, ddl_tensor_1d)
#define ddl_tensor_alloc DDL__PASTE(DDL_NAMESPACE, ddl_tensor_alloc)
#define ddl_tensor_count DDL__PASTE(DDL_NAMESPACE, ddl_tensor_count)
#define ddl_tensor_free DDL__PASTE(DDL_NAMESPACE, ddl_tensor_free)
#define ddl_tensor_from_dlpack DDL__PASTE(DDL_NAMESPACE, ddl_tensor_from_dlpack)
#define ddl_tensor_nd DDL__PASTE(DDL_NAMESPACE, ddl_tensor_nd)
#define ddl_tensor_to_dlpack DDL__PASTE(DDL_NAMESPACE, ddl_tensor_to_dlpack)
#define ddl_test DDL__PASTE(DDL_NAMESPACE, ddl_test)
#define ddl_test_all DDL__PASTE(DDL_NAMESPACE, ddl_test_all)
#define ddl_version DDL__PASTE(DDL_NAMESPACE, ddl_version)
#define ddl_wait DDL__PASTE(DDL_NAMESPACE, ddl_wait)
#define ddl_wait_all DDL__PASTE(DDL_NAMESPACE, ddl_wait_all)
#define ddl_wait_any DDL__PASTE(DDL_NAMESPACE, ddl_wait_any)
#define ddl_wait_some DDL__PASTE(DDL_NAMESPACE, ddl_wait_some)
#define ddl_world DDL__PASTE(DDL_NAMESPACE, ddl_world)
#endif

/* >>api */
/* api: what a program that uses ddl reads. Types and functions, documented here and nowhere else.
 * This room knows nothing of how any of it is done. */

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
    DDL_I64_I64 = 15  /* struct { int64_t value; int64_t index; } */
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
/* Frees memory of ddl_tensor_alloc and zeroes *tensor. A zeroed tensor is skipped. Errors: DDL_ERR_ARG when the memory
 * is not ddl's (or was freed before). [any thread] */
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
        uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool */
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL = C-contiguous */
    uint64_t byte_offset;
} ddl_dlpack;

/* Views a DLTensor. Nothing is copied; the memory stays its owner's. Errors: DDL_ERR_ARG (ndim, lanes),
 * DDL_ERR_UNSUPPORTED (a type or device that ddl has not). [any thread] */
DDL_API ddl_status ddl_tensor_from_dlpack(const ddl_dlpack *dlpack, ddl_tensor *out_tensor);
/* Shows a tensor as a DLTensor. out_dlpack points into *tensor, which must outlive it. Errors: DDL_ERR_ARG,
 * DDL_ERR_UNSUPPORTED (the value-index pairs). [any thread] */
DDL_API ddl_status ddl_tensor_to_dlpack(ddl_tensor *tensor, ddl_dlpack *out_dlpack);

/* >>op
 * Reductions. f16 and bf16 are accumulated in f32; integers wrap; AVG of integers truncates toward zero. AVG of f16 is
 * finite whenever the inputs are: they are scaled down, by a power of two, before the sum. */
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
 * On error *out_context is NULL and nothing is left behind. [any thread] */
DDL_API ddl_status ddl_init(const ddl_config *config, ddl_context **out_context);
/* Leaves the job and sets *context to NULL; NULL is fine. Says goodbye to peers and does not wait for what they do; it
 * may stay up to 500 ms until the last bytes have arrived there. Requests end with DDL_ERR_STATE in the threads that
 * wait for them, and are freed; groups that the caller created remain to be freed. Any use of a handle of the context
 * after this (a copy of the context, the world, a group, a request) gives DDL_ERR_STATE and a sentence. That holds for
 * the last 16 contexts of a process; with an allocator of the program's own only until its last group is freed, for
 * then all memory is given back. [one thread] */
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
/* Lets operations progress without waiting for one. [any thread] */
DDL_API ddl_status ddl_progress(ddl_context *context);

/* What went over one transport. Collectives that it runs by itself are no messages. */
typedef struct ddl_transport_stats {
    const char *name; /* "tcp"; valid until ddl_finalize. NULL: there is no such transport */
    uint64_t messages_sent, messages_received;
    uint64_t bytes_sent, bytes_received;
    uint64_t peers; /* ranks that are reached by it */
} ddl_transport_stats;
#define DDL_STATS_TRANSPORTS 8
typedef struct ddl_stats {
    uint64_t ops_started, ops_completed, ops_failed;
    uint64_t messages_sent, messages_received;
    uint64_t bytes_sent, bytes_received;
    uint64_t wait_ns;           /* time inside blocking waits, of those that were not over at once */
    uint64_t memory_bytes;      /* held by this context now, tensors of ddl_tensor_alloc excluded */
    uint64_t memory_peak_bytes; /* the most it ever held */
    uint64_t peers_connected;
    uint64_t strangers_refused; /* connections that could not prove that they belong here */
    uint64_t unexpected_bytes;  /* arrived, not asked for yet */
    ddl_transport_stats transports[DDL_STATS_TRANSPORTS]; /* the messages and bytes above, by transport */
} ddl_stats;
/* Reads the counters. [any thread] */
DDL_API ddl_status ddl_stats_get(ddl_context *context, ddl_stats *out_stats);

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
/* Makes the group of the survivors after DDL_ERR_PEER. Every survivor calls; they agree on who is left. Errors:
 * DDL_ERR_QUORUM when not more than half of the group is left. [any thread] */
DDL_API ddl_status ddl_group_shrink(ddl_group *group, ddl_group **out_group);

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

/* >>plugin */
/* plugin: the ABI between ddl and its transports and devices; what plugin authors read. docs/plugins.md is the guide.
 * Append-only: a table grows at its end, its first member is its size, and an optional member is read only through
 * DDL_HAS. This room knows nothing of how the core uses a table beyond what is said here. */

#ifdef __cplusplus
extern "C" {
#endif

/* A plugin NAME is libddl-NAME.so with one exported function ddl_plugin_NAME_v1, of type ddl_plugin_fn. It returns a
 * constant table, or NULL when it cannot work on this machine (it says why through host->log). */
#define DDL_PLUGIN_ABI 1u

/* 1 when a table that says it is `size` bytes long has the member and it is not NULL. */
#define DDL_HAS(table, member)                                                                                         \
    ((table) != NULL &&                                                                                                \
     (table)->size >= (uint32_t)((const char *)(&(table)->member + 1) - (const char *)(table)) &&                      \
     (table)->member != NULL)

/* Sending: the core owns a ddl_message until the transport says sent(). A transport may chain messages through next and
 * keep its own notes in priv; nothing has to be allocated to send. */
#define DDL_MESSAGE_HEADER_BYTES 48
#define DDL_MESSAGE_PAYLOAD_BYTES (1u << 20)
typedef struct ddl_message {
    uint8_t header[DDL_MESSAGE_HEADER_BYTES]; /* opaque to the transport, delivered as it is */
    const void *payload;
    uint64_t payload_bytes; /* <= the transport's max_payload_bytes */
    struct ddl_message *next;
    uint64_t priv[4];
} ddl_message;

/* >>host
 * Services for a plugin. `host` is passed back as the first argument of each. Every call into a transport is made under
 * the context's lock, so that a transport needs none of its own; it calls host functions from inside those calls. */
typedef struct ddl_host {
    uint32_t size;
    uint32_t abi; /* DDL_PLUGIN_ABI of the program */
    void *core;   /* the core's own */

    void *(*alloc)(const struct ddl_host *host, size_t bytes); /* [any thread] */
    void (*free)(const struct ddl_host *host, void *memory);   /* [any thread] */
    void (*log)(const struct ddl_host *host, ddl_log_level level, const char *line); /* [any thread] */
    /* Value of a setting (DDL_<NAME>) or NULL. A plugin reads its settings here, never with getenv. */
    const char *(*setting)(const struct ddl_host *host, const char *name);
    uint64_t (*now_ns)(const struct ddl_host *host); /* CLOCK_MONOTONIC, or a simulation's clock */

    /* A whole message lies in memory of the transport's; it is used or copied before the call returns. Returns
     * DDL_ERR_CORRUPT when the header is not valid: close the link to peer with host->lost. [in progress] */
    ddl_status (*deliver)(const struct ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                          uint64_t payload_bytes);
    /* A header has come and its payload will: *out_landing is where the payload_bytes bytes go. Then call landed with
     * the token, once, even if the link dies half-way (status says so). For streams and remote writes. [in progress] */
    ddl_status (*land)(const struct ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_payload_bytes,
                       void **out_landing, void **out_token);
    void (*landed)(const struct ddl_host *host, int32_t peer, void *token, ddl_status status);
    /* The message (from send) or the transfer (from get, put) is finished: its memory may be used again. */
    void (*sent)(const struct ddl_host *host, ddl_message *message, ddl_status status);
    void (*transferred)(const struct ddl_host *host, void *cookie, ddl_status status);
    /* The link to a peer is gone. system_error is an errno or 0 for an orderly close: ETIMEDOUT, EHOSTUNREACH, ENETDOWN
     * when its host does not answer, ENOTCONN when there never was a connection, EBADMSG after damaged bytes. The core
     * decides who is dead. */
    void (*lost)(const struct ddl_host *host, int32_t peer, int32_t system_error, const char *what);

    /* For transports that open sockets: mutual proof of the job secret over a connected socket, in the core's own way.
     * Secrets are never given to a plugin. NULL when the program has none. Non-blocking: see docs/plugins.md. */
    ddl_status (*prove)(const struct ddl_host *host, void **state, int32_t is_client, int32_t peer, const uint8_t *in,
                        size_t in_bytes, size_t *out_used, uint8_t *out, size_t *out_bytes, int32_t *out_peer);
    /* Passes a file descriptor (shared memory, devices) to a rank on the same host, over a unix socket whose other end
     * proved that it is of this job; fd -1 passes the tag alone. The descriptor is duplicated before the call returns.
     * DDL_OK: it is on its way. DDL_ERR_UNSUPPORTED: peer is on another host, or unix sockets cannot be used. */
    ddl_status (*send_fd)(const struct ddl_host *host, int32_t peer, uint64_t tag, int fd);
    /* Takes what peer passed with that tag; the descriptor (-1: the tag came alone) is the caller's to close.
     * DDL_IN_PROGRESS: it has not come; DDL_ERR_UNSUPPORTED: none can come, as in send_fd. */
    ddl_status (*take_fd)(const struct ddl_host *host, int32_t peer, uint64_t tag, int *out_fd);

    /* For streams: checks a header and says how long its payload is. When the whole payload has come already, deliver
     * it where it lies; else land it. Returns DDL_ERR_CORRUPT like deliver. [in progress] */
    ddl_status (*measure)(const struct ddl_host *host, int32_t peer, const uint8_t *header,
                          uint64_t *out_payload_bytes);

    /* For transports without connections, whose messages must each show where they come from: 32 bytes that follow
     * from the data, the job and its secret, so that only members can make them. DDL_ERR_UNSUPPORTED: no secret. */
    ddl_status (*derive)(const struct ddl_host *host, const void *data, size_t bytes, uint8_t out[32]);
} ddl_host;

/* >>transport */
enum {
    DDL_TRANSPORT_LOCAL = 1u << 0,  /* reaches ranks of the same host only */
    DDL_TRANSPORT_ORDERED = 1u << 1,   /* messages to one peer arrive in order; needed today */
    DDL_TRANSPORT_ON_REQUEST = 1u << 2, /* used only when DDL_TRANSPORTS names it: for tests and simulations */
    DDL_TRANSPORT_CHEAP_PROGRESS = 1u << 3, /* progress makes no system call: the core looks here first and often */
    DDL_TRANSPORT_BLIND = 1u << 4 /* does not notice that another host is gone: the core watches it over TCP as well */
};

typedef struct ddl_transport_params {
    uint32_t size;
    int32_t rank, world_size;
    int32_t local_ranks;           /* ranks on this host */
    int32_t cores;                 /* that this process may use */
    const char *host_id;           /* equal on two ranks when they share a host */
    const char *interface_name;    /* or NULL */
    const char *advertise;         /* or NULL */
    const char *port_range;        /* or NULL */
    const char *master_host;       /* bind to the interface that leads there; NULL: any not loopback */
    int32_t authenticated;         /* 1: there is a job secret, prove() works between hosts */
    int32_t asked;      /* 1: DDL_TRANSPORTS names this transport, 0: it was found and may be of use */
    const char *detail; /* what follows its name there, as tcp in fabric:tcp; or NULL */
} ddl_transport_params;

/* Memory that was registered for get and put: key is opaque, made by one rank, used by its peers. */
typedef struct ddl_memory_key {
    uint64_t base; /* what the owner's address is called in offsets: its address, or 0 */
    uint8_t bytes[56];
} ddl_memory_key;

/* A collective that a transport runs by itself, by load and store, for a set of ranks (native_open). Buffers are
 * packed; which are looked at and how they may coincide is as in api.h, `bytes` being those of the smaller tensor. */
typedef struct ddl_native_call {
    uint32_t size;
    int32_t kind; /* ddl_kind, none of the v-forms */
    int32_t root; /* rank in the set; 0 where there is none */
    int32_t element_bytes;
    uint64_t sequence;  /* of calls on this set: 1, 2, ..., the same on all its ranks */
    uint64_t signature; /* equal on all ranks when they call the same */
    const void *in;
    void *out;
    uint64_t bytes;
    /* dst = (srcs[0] op srcs[1]) op ..., on bytes bytes; dst may be one of srcs. NULL for kinds that do not reduce. */
    void (*reduce)(void *arg, void *dst, const void *const *srcs, int32_t src_count, uint64_t bytes);
    void *reduce_arg;
} ddl_native_call;

typedef struct ddl_transport {
    uint32_t size;
    uint32_t flags;
    uint64_t max_payload_bytes; /* of one message; at least DDL_MESSAGE_PAYLOAD_BYTES, and no more is used */

    /* Makes one endpoint for one context. The host outlives it. *out_self is passed to all others. */
    ddl_status (*open)(const ddl_host *host, const ddl_transport_params *params, void **out_self);
    /* Ends it: sends what is queued if that does not block, then closes. Never waits for a peer. */
    void (*close)(void *self);
    /* Writes this rank's address, at most *bytes long (256 is offered); peers get it byte for byte. */
    ddl_status (*address)(void *self, void *out_address, size_t *bytes);
    /* Learns a peer's address. Returns DDL_ERR_UNSUPPORTED when that peer cannot be reached this way. Connects lazily.
     * out_latency_ns and out_bytes_per_s are first guesses; the core measures. */
    ddl_status (*add_peer)(void *self, int32_t peer, const void *address, size_t bytes, const char *peer_host_id,
                           uint64_t *out_latency_ns, uint64_t *out_bytes_per_s);
    /* Sends a message. DDL_OK: taken, all memory may be used again, sent() will not be called. DDL_IN_PROGRESS:
     * borrowed until sent(). Anything else: not sent. Never blocks. Messages to one peer leave in order. */
    ddl_status (*send)(void *self, int32_t peer, ddl_message *message);
    /* Moves things along without blocking. expect is a rank that the core would most like to hear from, or -1.
     * Returns how many events there were, negative on a failure of the whole transport: all its links are lost. */
    int32_t (*progress)(void *self, int32_t expect);
    /* Prepares to sleep: DDL_OK when *out_fd turns readable on the next event; DDL_IN_PROGRESS when there is something
     * to do at once. */
    ddl_status (*arm)(void *self, int *out_fd);
    /* The core knows that a peer is dead: drop all that is queued for it (sent() with DDL_ERR_PEER), close its link,
     * end what is landing. */
    void (*peer_dead)(void *self, int32_t peer);

    /* Optional from here: NULL, or beyond `size`. */
    /* Sleeps its own way until an event, a readable fd of fds, or the timeout. Instead of arm for a transport with a
     * clock of its own (a simulation) or a futex. */
    ddl_status (*wait)(void *self, int64_t timeout_ns, const int *fds, int32_t fd_count);
    uint64_t (*clock_ns)(void *self); /* instead of CLOCK_MONOTONIC */
    ddl_status (*connect)(void *self, int32_t peer); /* starts a connection ahead of its first use */
    /* memory_alloc gives memory that peers reach without a copy, for ddl_tensor_alloc; an error: ordinary memory is
     * used. Registered memory. put completes (transferred) when the peer's memory holds the data. */
    ddl_status (*memory_alloc)(void *self, size_t bytes, void **out_memory);
    void (*memory_free)(void *self, void *memory);
    ddl_status (*memory_register)(void *self, void *memory, size_t bytes, void **out_handle, ddl_memory_key *out_key);
    void (*memory_release)(void *self, void *handle);
    ddl_status (*get)(void *self, int32_t peer, void *local, void *local_handle, const ddl_memory_key *key,
                      uint64_t offset, uint64_t bytes, void *cookie);
    ddl_status (*put)(void *self, int32_t peer, const void *local, void *local_handle, const ddl_memory_key *key,
                      uint64_t offset, uint64_t bytes, void *cookie);
    /* Native collectives. native_open says whether this set of world ranks can be served (DDL_ERR_UNSUPPORTED: plans
     * are used); the core then makes sure that all of them agree. rank is this rank's place in ranks. */
    ddl_status (*native_open)(void *self, uint64_t group, const int32_t *ranks, int32_t count, int32_t rank,
                              void **out_set);
    /* Ends a set whose operations have ended or were cancelled. */
    void (*native_close)(void *self, void *set);
    /* About how long one takes; 0: not served, plans are used. The same on all ranks of the set. */
    uint64_t (*native_cost_ns)(void *self, void *set, int32_t kind, uint64_t bytes);
    /* Begins the next operation of a set; never blocks. *call is copied. Operations of a set end in order. */
    ddl_status (*native_start)(void *self, void *set, const ddl_native_call *call, void **out_op);
    /* Looks at an operation up to `looks` times, without giving the core away: DDL_OK when it has ended and is gone,
     * DDL_IN_PROGRESS while it waits for rank *out_rank of the set (-1: for several), or DDL_ERR_MISMATCH when that
     * rank has begun it with another signature; then nothing was written to out, and it waits for native_cancel. */
    ddl_status (*native_test)(void *self, void *set, void *op, int32_t looks, int32_t *out_rank);
    /* Gives an operation up, because a rank died, called something else, or time is over: on return its buffers are not
     * touched any more, by no rank. The set serves no further operation. */
    void (*native_cancel)(void *self, void *set, void *op);
    /* An operation that failed or was cancelled wants its memory back while a message is under way. recall: on return
     * the message is not referred to any more (what must still be sent of it is copied first); sent() is not called.
     * redirect: the rest of what is landing with this token goes to new_landing + what has landed already; NULL: there
     * is no memory for it, the link is to be dropped, though not before this call has returned. Without recall the core
     * hands out copies; without redirect all lands in memory of the core's and is copied from there. */
    void (*recall)(void *self, int32_t peer, ddl_message *message);
    void (*redirect)(void *self, int32_t peer, void *token, void *new_landing);
    /* Asked for each peer at the start, after add_peer for all, until it is not DDL_IN_PROGRESS: for what has to be set
     * up together, such as memory that is shared. An error: the peer is reached another way. Both sides of a pair must
     * come to the same answer. */
    ddl_status (*ready)(void *self, int32_t peer);
    /* For people, in ddl-info: in what way data goes to a peer at present, a few words that stay where they are. */
    const char *(*describe)(void *self, int32_t peer);
} ddl_transport;

/* >>device
 * Memory that the CPU does not reduce by itself. Streams and events are the plugin's own pointers. */
typedef struct ddl_device {
    uint32_t size;
    uint32_t flags;
    ddl_status (*open)(const ddl_host *host, int32_t device, void **out_self);
    void (*close)(void *self);
    int32_t (*count)(void); /* devices of this kind on this machine */
    /* Which device a pointer belongs to: 0 host, 1.. this plugin's device + 1, negative error. */
    int32_t (*owner)(void *self, const void *pointer);
    ddl_status (*alloc)(void *self, size_t bytes, void **out_memory);
    void (*free)(void *self, void *memory);
    /* All four are ordered on stream (NULL: the plugin's own) and do not wait. */
    ddl_status (*copy)(void *self, void *dst, const void *src, size_t bytes, void *stream);
    ddl_status (*fill)(void *self, void *dst, int value, size_t bytes, void *stream);
    ddl_status (*reduce)(void *self, void *dst, const void *const *srcs, int32_t src_count, int64_t count,
                         int32_t dtype, int32_t op, void *stream);
    ddl_status (*strided)(void *self, const ddl_tensor *tensor, void *packed, int32_t unpack, void *stream);
    ddl_status (*event_record)(void *self, void *stream, void **out_event);
    ddl_status (*event_test)(void *self, void *event); /* DDL_IN_PROGRESS until it has happened */
    void (*event_free)(void *self, void *event);
} ddl_device;

/* >>plugin */
typedef struct ddl_plugin {
    uint32_t size;
    uint32_t abi;        /* DDL_PLUGIN_ABI it was built with; refused when it is not the program's */
    const char *name;    /* as in libddl-NAME.so */
    const char *version; /* free text */
    const char *about;   /* one sentence */
    const ddl_transport *transport; /* or NULL */
    const ddl_device *device;       /* or NULL */
} ddl_plugin;

typedef const ddl_plugin *(*ddl_plugin_fn)(const ddl_host *host);

#if defined(__GNUC__)
#define DDL_PLUGIN_EXPORT __attribute__((visibility("default")))
#else
#define DDL_PLUGIN_EXPORT
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DDL_H */

/* >>implementation */
#if defined(DDL_IMPLEMENTATION) && !defined(DDL__IMPLEMENTED)
#define DDL__IMPLEMENTED

#ifdef __cplusplus
#error "ddl.h: the implementation is C. Make a file ddl.c of two lines and compile it as C: \
#define DDL_IMPLEMENTATION (newline) #include \"ddl.h\" (newline)"
#endif
#ifndef __USE_GNU
#error "ddl.h: a system header came before; include ddl.h first in this file, or compile it with -D_GNU_SOURCE"
#endif

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* >>base */
/* base: what every room above stands on: error sentences, log, clock, memory hook, hash.
 * It must not know of ranks, sockets or tensors. */

#define DDL__COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define DDL__MIN(a, b) ((a) < (b) ? (a) : (b))
#define DDL__MAX(a, b) ((a) > (b) ? (a) : (b))
#define DDL__NS_PER_MS 1000000ull
#define DDL__NS_PER_S 1000000000ull
#define DDL__NEVER UINT64_MAX /* a deadline that does not come */

/* Passes an error on: the sentence has been written where it happened. */
#define DDL__TRY(call)                                                                                                 \
    do {                                                                                                               \
        ddl_status try_status_ = (call);                                                                               \
        if (try_status_ < 0) {                                                                                         \
            return try_status_;                                                                                        \
        }                                                                                                              \
    } while (0)

DDL_API const char *ddl_status_name(ddl_status status) {
    switch (status) {
#define DDL__STATUS_NAME(name, value, text)                                                                            \
    case name:                                                                                                         \
        return #name;
        DDL_STATUS_LIST(DDL__STATUS_NAME)
#undef DDL__STATUS_NAME
    }
    return "DDL_?";
}

DDL_API const char *ddl_status_text(ddl_status status) {
    switch (status) {
#define DDL__STATUS_TEXT(name, value, text)                                                                            \
    case name:                                                                                                         \
        return text;
        DDL_STATUS_LIST(DDL__STATUS_TEXT)
#undef DDL__STATUS_TEXT
    }
    return "unknown status";
}

/* An error sentence and its status, kept by whoever reports it. Long enough for a mismatch with two calls in it. */
#define DDL__SENTENCE_BYTES 1024
typedef struct ddl__sentence {
    ddl_status status;
    char text[DDL__SENTENCE_BYTES];
} ddl__sentence;

/* Writes the sentence and returns the status, so that an error is one `return ddl__fail(...)`. errno is kept.
 * sentence may be NULL. */
static ddl_status __attribute__((format(printf, 3, 4))) ddl__fail(ddl__sentence *sentence, ddl_status status,
                                                                 const char *format, ...) {
    int saved = errno;
    if (sentence != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(sentence->text, sizeof sentence->text, format, args);
        va_end(args);
        sentence->status = status;
    }
    errno = saved;
    return status;
}

/* Text that is built piece by piece in a fixed buffer; what does not fit is counted and dropped. */
typedef struct ddl__text {
    char *out;
    size_t cap, used;
} ddl__text;

static void __attribute__((format(printf, 2, 3))) ddl__text_add(ddl__text *text, const char *format, ...) {
    size_t at = DDL__MIN(text->used, text->cap);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text->cap > at ? text->out + at : NULL, text->cap - at, format, args);
    va_end(args);
    text->used += n > 0 ? (size_t)n : 0;
}

static uint64_t ddl__now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * DDL__NS_PER_S + (uint64_t)t.tv_nsec;
}

/* now + ms, and never for a negative ms. */
static uint64_t ddl__deadline(uint64_t now_ns, int64_t ms) {
    return ms < 0 ? DDL__NEVER : now_ns + (uint64_t)ms * DDL__NS_PER_MS;
}

/* Memory and log of one context: the part of it that low rooms may see. The counters are under the context's lock. */
typedef struct ddl__base {
    ddl_allocator allocator; /* alloc NULL: malloc and free */
    ddl_log_fn log;
    void *log_user;
    ddl_log_level log_level;
    int32_t rank; /* only to sign log lines; -1 until it is known */
    uint64_t memory, memory_peak;
} ddl__base;

static void __attribute__((format(printf, 3, 4))) ddl__log(const ddl__base *base, ddl_log_level level,
                                                          const char *format, ...) {
    if (level > base->log_level) {
        return;
    }
    int saved = errno;
    char line[DDL__SENTENCE_BYTES + 64];
    ddl__text text = {line, sizeof line, 0};
    if (base->rank >= 0) {
        ddl__text_add(&text, "ddl: rank %d: ", base->rank);
    } else {
        ddl__text_add(&text, "ddl: ");
    }
    va_list args;
    va_start(args, format);
    vsnprintf(line + text.used, sizeof line - text.used, format, args);
    va_end(args);
    if (base->log != NULL) {
        base->log(base->log_user, level, line);
    } else {
        fprintf(stderr, "%s\n", line);
    }
    errno = saved;
}

/* Each block remembers its size, for the count of memory held. 16 bytes keep malloc's alignment. */
#define DDL__SIZE_BYTES 16

/* Zeroed memory or NULL. */
static void *ddl__alloc(ddl__base *base, size_t bytes) {
    if (bytes > SIZE_MAX - DDL__SIZE_BYTES) {
        return NULL;
    }
    size_t whole = bytes + DDL__SIZE_BYTES;
    char *block = base->allocator.alloc != NULL ? base->allocator.alloc(base->allocator.user, whole) : malloc(whole);
    if (block == NULL) {
        return NULL;
    }
    memset(block, 0, whole);
    memcpy(block, &whole, sizeof whole);
    base->memory += whole;
    base->memory_peak = DDL__MAX(base->memory_peak, base->memory);
    return block + DDL__SIZE_BYTES;
}

static void ddl__free(ddl__base *base, void *memory) {
    if (memory == NULL) {
        return;
    }
    char *block = (char *)memory - DDL__SIZE_BYTES;
    size_t whole;
    memcpy(&whole, block, sizeof whole);
    base->memory -= whole;
    if (base->allocator.free != NULL) {
        base->allocator.free(base->allocator.user, block);
    } else {
        free(block);
    }
}

/* count * bytes, NULL when that overflows. */
static void *ddl__alloc_array(ddl__base *base, size_t count, size_t bytes) {
    size_t whole;
    return __builtin_mul_overflow(count, bytes, &whole) ? NULL : ddl__alloc(base, whole);
}

static char *ddl__copy_string(ddl__base *base, const char *string) {
    size_t bytes = strlen(string) + 1;
    char *copy = ddl__alloc(base, bytes);
    if (copy != NULL) {
        memcpy(copy, string, bytes);
    }
    return copy;
}

/* Mixes a word into a hash: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). For signatures of calls:
 * collisions must be unlikely, not hard to make. */
static uint64_t ddl__mix(uint64_t hash, uint64_t word) {
    uint64_t z = (hash ^ word) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static uint64_t ddl__mix_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = ddl__mix(hash, at[i]);
    }
    return ddl__mix(hash, bytes);
}

/* >>dtype/types */
/* dtype/types: sizes and names of element types, which op makes sense for which type, and what this processor can do.
 * Must not know: who reduces, why, or where the bytes come from. */

#define DDL__DTYPES 16 /* values of ddl_dtype, DDL_DTYPE_NONE included */
#define DDL__OPS 14    /* built-in values of ddl_op, DDL_OP_NONE included; created ops begin at 256 */

/* A dtype may come from a peer or from an uninitialised tensor, so every table is entered through this test. */
static inline int ddl__dtype_known(ddl_dtype dtype) {
    return (unsigned)dtype > (unsigned)DDL_DTYPE_NONE && (unsigned)dtype < DDL__DTYPES;
}

/* Size of one element, 0 for an unknown type. */
static inline size_t ddl__dtype_bytes(ddl_dtype dtype) {
    static const uint8_t bytes[DDL__DTYPES] = {0, 2, 2, 4, 8, 1, 1, 4, 4, 8, 8, 1, 8, 16, 8, 16};
    return ddl__dtype_known(dtype) ? bytes[dtype] : 0;
}

static inline const char *ddl__dtype_name(ddl_dtype dtype) {
    static const char names[DDL__DTYPES][8] = {"none", "f16", "bf16", "f32", "f64", "i8", "u8", "i32",
                                               "u32", "i64", "u64", "bool", "f32_i32", "f64_i64", "i32_i32", "i64_i64"};
    return ddl__dtype_known(dtype) ? names[dtype] : "?";
}

DDL_API size_t ddl_dtype_bytes(ddl_dtype dtype) {
    return ddl__dtype_bytes(dtype);
}

DDL_API const char *ddl_dtype_name(ddl_dtype dtype) {
    return ddl__dtype_name(dtype);
}

static inline const char *ddl__op_name(ddl_op op) {
    static const char names[DDL__OPS][10] = {"none", "sum",  "prod", "min", "max",  "avg",       "band",
                                             "bor",  "bxor", "land", "lor", "lxor", "min_index", "max_index"};
    return op > DDL_OP_NONE && op < DDL__OPS ? names[op] : op >= 256 ? "created" : "?";
}

static inline int ddl__dtype_is_half(ddl_dtype dtype) {
    return dtype == DDL_F16 || dtype == DDL_BF16;
}

static inline int ddl__dtype_is_float(ddl_dtype dtype) {
    return dtype >= DDL_F16 && dtype <= DDL_F64;
}

static inline int ddl__dtype_is_integer(ddl_dtype dtype) {
    return dtype >= DDL_I8 && dtype <= DDL_U64;
}

/* Whether a built-in op is defined for a type; 0 for created ops, which only their function can judge.
 * The sum of bool is "or", the product and the minimum "and", as in torch; its average would not be a bool. */
static inline int ddl__op_valid(ddl_op op, ddl_dtype dtype) {
    int arithmetic = op >= DDL_SUM && op <= DDL_MAX;
    int logic = op >= DDL_BAND && op <= DDL_LXOR;
    if (ddl__dtype_is_float(dtype)) {
        return arithmetic || op == DDL_AVG;
    }
    if (ddl__dtype_is_integer(dtype)) {
        return arithmetic || op == DDL_AVG || logic;
    }
    if (dtype == DDL_BOOL) {
        return arithmetic || logic;
    }
    return ddl__dtype_known(dtype) && (op == DDL_MIN_INDEX || op == DDL_MAX_INDEX);
}

/* Instruction sets the kernels are compiled for. A level is an argument, so that a test can run every one of them. */
typedef enum ddl__cpu {
    DDL__CPU_PORTABLE, /* 16-byte vectors in the compiler's generic dialect: SSE2, NEON, VSX or plain scalars */
    DDL__CPU_AVX2,     /* 32-byte vectors, and F16C for f16 */
    DDL__CPU_AVX512,   /* 64-byte vectors for f32, f64 and bf16; the rest as AVX2, since it gains nothing */
    DDL__CPU_LEVELS
} ddl__cpu;

/* clang before 17 has no name for F16C; no processor was made with AVX2 and FMA but without F16C. */
#if defined(__clang__)
#define DDL__F16C_NAME "fma"
#else
#define DDL__F16C_NAME "f16c"
#endif

/* Best level of this processor. Nothing is cached here (no mutable globals): the compiler's own table, filled before
 * main by its run-time library, is read with two loads, so asking costs less than one kernel call. */
static inline ddl__cpu ddl__cpu_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports(DDL__F16C_NAME)) {
        /* BF16 is asked for because bf16 needs it, and because earlier processors lower their clock for 64 bytes. */
        int wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
        return wide ? DDL__CPU_AVX512 : DDL__CPU_AVX2;
    }
#endif
    return DDL__CPU_PORTABLE;
}

/* >>dtype/vectors */
/* dtype/vectors: the vector types that kernels are written in, and conversion of f16 and bf16 in them.
 * Must not know: reductions.
 *
 * Everything is written in the vector extensions of GCC and clang, because gcc 12 hardly vectorises a loop at -O2 and
 * the library has to be fast under the flags of its user. The same macro text serves every width, down to a vector of
 * one element for the end of a buffer, so that all elements of all paths get the same bits by construction.
 *
 * For each element type E there are E_v16 (16 bytes wide), E_v32, E_v64 and E_v1 (one element), the unsigned vectors of
 * the same shape E_u16, E_u32, E_u64, E_u1, and E_element. All of them may lie at any address and alias anything. */

#if defined(__x86_64__)
#include <immintrin.h>
#define DDL__AVX2 __attribute__((target("avx2,f16c")))
#define DDL__AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
/* Last in each function with wide vectors: gcc adds it by itself only from -O2, and without it the SSE code of the
 * program runs slower on some processors. */
#define DDL__LEAVE_avx2 _mm256_zeroupper()
#define DDL__LEAVE_avx512 _mm256_zeroupper()
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define DDL__LEAVE_portable ((void)0)

#define DDL__VECTOR(width) __attribute__((vector_size(width), aligned(1), may_alias))
#define DDL__DEFINE_VECTORS(E, element, type, unsigned_type)                                                           \
    typedef element E##_element;                                                                                       \
    typedef type E##_v1 DDL__VECTOR(sizeof(type));                                                                     \
    typedef type E##_v16 DDL__VECTOR(16);                                                                              \
    typedef type E##_v32 DDL__VECTOR(32);                                                                              \
    typedef type E##_v64 DDL__VECTOR(64);                                                                              \
    typedef unsigned_type E##_u1 DDL__VECTOR(sizeof(type));                                                            \
    typedef unsigned_type E##_u16 DDL__VECTOR(16);                                                                     \
    typedef unsigned_type E##_u32 DDL__VECTOR(32);                                                                     \
    typedef unsigned_type E##_u64 DDL__VECTOR(64);

DDL__DEFINE_VECTORS(ddl__i8, int8_t, int8_t, uint8_t)
DDL__DEFINE_VECTORS(ddl__u8, uint8_t, uint8_t, uint8_t)
DDL__DEFINE_VECTORS(ddl__i32, int32_t, int32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__u32, uint32_t, uint32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__i64, int64_t, int64_t, uint64_t)
DDL__DEFINE_VECTORS(ddl__u64, uint64_t, uint64_t, uint64_t)
DDL__DEFINE_VECTORS(ddl__f32, float, float, uint32_t)
DDL__DEFINE_VECTORS(ddl__f64, double, double, uint64_t)
/* Two halves ride in one 32-bit word: widening both takes shifts and masks, never a shuffle, and works in either byte
 * order since each half goes back to where it came from. A lone half leaves the other half of its word zero. */
DDL__DEFINE_VECTORS(ddl__f16, uint16_t, uint32_t, uint32_t)
DDL__DEFINE_VECTORS(ddl__bf16, uint16_t, uint32_t, uint32_t)
/* Vectors of halves one by one, for conversion between arrays; named after the width of the f32 side. */
typedef uint16_t ddl__half_v16 DDL__VECTOR(8);
typedef uint16_t ddl__half_v32 DDL__VECTOR(16);

/* Each DDL__..(E, W, ..) is a statement over vectors of element type E and width W.
 *
 * Every NaN result becomes the quiet NaN with all bits set, in every float type: which payload an addition keeps
 * depends on the order of its operands, yet ranks must agree on each bit. It costs a comparison and an "or"; AVX-512
 * compares into a mask, which compilers turn back into a vector before they "or", so there it is spelled out. */
#define DDL__CANONICAL_NAN(E, W, r) DDL__CANONICAL_NAN_##W(E, r)
#define DDL__CANONICAL_NAN_OR(E, W, r) ((r) = (E##_v##W)((E##_u##W)(r) | (E##_u##W)((r) != (r))))
#define DDL__CANONICAL_NAN_1(E, r) DDL__CANONICAL_NAN_OR(E, 1, r)
#define DDL__CANONICAL_NAN_16(E, r) DDL__CANONICAL_NAN_OR(E, 16, r)
#define DDL__CANONICAL_NAN_32(E, r) DDL__CANONICAL_NAN_OR(E, 32, r)
#if defined(__x86_64__)
#define DDL__CANONICAL_NAN_64(E, r) ((r) = E##_canonical_v64(r))
DDL__AVX512 static inline __attribute__((always_inline)) ddl__f32_v64 ddl__f32_canonical_v64(ddl__f32_v64 r) {
    __m512i ones = _mm512_set1_epi32(-1);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)r, (__m512)r, _CMP_UNORD_Q);
    return (ddl__f32_v64)_mm512_mask_mov_epi32((__m512i)r, nan, ones);
}
DDL__AVX512 static inline __attribute__((always_inline)) ddl__f64_v64 ddl__f64_canonical_v64(ddl__f64_v64 r) {
    __m512i ones = _mm512_set1_epi64(-1);
    __mmask8 nan = _mm512_cmp_pd_mask((__m512d)r, (__m512d)r, _CMP_UNORD_Q);
    return (ddl__f64_v64)_mm512_mask_mov_epi64((__m512i)r, nan, ones);
}
#endif

/* f = the f16 in the low 16 bits of each word of h. Subnormals become normal by a subtraction that has no subnormal
 * operand, so that flush-to-zero modes do not change the result. After F. Giesen, half_to_float_fast4. */
#define DDL__F16_WIDEN(W, f, h)                                                                                        \
    do {                                                                                                               \
        ddl__f32_u##W bits_ = ((h) & 0x7fff) << 13, exponent_ = bits_ & 0x0f800000;                                    \
        ddl__f32_u##W special_ = (ddl__f32_u##W)(exponent_ == 0x0f800000), tiny_ = (ddl__f32_u##W)(exponent_ == 0);    \
        ddl__f32_u##W normal_ = bits_ + 0x38000000 + (special_ & 0x38000000);                                          \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)(bits_ + 0x38800000) - 0x1p-14f);                        \
        (f) = (ddl__f32_v##W)((small_ & tiny_) | (normal_ & ~tiny_) | (((h) & 0x8000) << 16));                         \
    } while (0)

/* h = f rounded to nearest even as f16, in the low 16 bits of each word. Adding 0.5 aligns a result below 2^-14 so
 * that the addition itself rounds to the subnormal grid. After F. Giesen, float_to_half_fast3_rtne. */
#define DDL__F16_NARROW(W, h, f)                                                                                       \
    do {                                                                                                               \
        ddl__f32_u##W all_ = (ddl__f32_u##W)(f), bits_ = all_ & 0x7fffffff;                                            \
        ddl__i32_v##W order_ = (ddl__i32_v##W)bits_; /* SSE2 and AVX2 compare signed words only */                     \
        ddl__f32_u##W tiny_ = (ddl__f32_u##W)(order_ < 0x38800000), huge_ = (ddl__f32_u##W)(order_ >= 0x47800000);     \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)(order_ > 0x7f800000);                                                     \
        ddl__f32_u##W small_ = (ddl__f32_u##W)((ddl__f32_v##W)bits_ + 0.5f) - 0x3f000000;                              \
        ddl__f32_u##W normal_ = (bits_ + 0xc8000fff + ((bits_ >> 13) & 1)) >> 13;                                      \
        normal_ = (small_ & tiny_) | (normal_ & ~tiny_ & ~huge_) | (huge_ & 0x7c00) | (nan_ & 0xffff);                 \
        (h) = normal_ | ((all_ >> 16) & 0x8000);                                                                       \
    } while (0)

#define DDL__BF16_WIDEN(W, f, h) ((f) = (ddl__f32_v##W)((h) << 16))

/* h = f rounded to nearest even as bf16; a carry out of the mantissa rightly becomes the next exponent. */
#define DDL__BF16_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        ddl__f32_u##W nan_ = (ddl__f32_u##W)((f) != (f)), bits_ = (ddl__f32_u##W)(f);                                  \
        (h) = ((bits_ + 0x7fff + ((bits_ >> 16) & 1)) | nan_) >> 16;                                                   \
    } while (0)

/* >>dtype/half */
/* dtype/half: conversion between f32 and the 16-bit types, one value or an array.
 * Rounds to nearest even; keeps infinities, subnormals, the sign of zero; a NaN becomes the one with all bits set.
 * Must not know: reductions. */

#define DDL__DEFINE_HALF(E, NAME)                                                                                      \
    static inline float E##_to_f32(uint16_t half) {                                                                    \
        ddl__f32_u1 h = {half};                                                                                        \
        ddl__f32_v1 f;                                                                                                 \
        NAME##_WIDEN(1, f, h);                                                                                         \
        DDL__CANONICAL_NAN(ddl__f32, 1, f);                                                                            \
        return f[0];                                                                                                   \
    }                                                                                                                  \
    static inline uint16_t E##_from_f32(float value) {                                                                 \
        ddl__f32_v1 f = {value};                                                                                       \
        ddl__f32_u1 h;                                                                                                 \
        NAME##_NARROW(1, h, f);                                                                                        \
        return (uint16_t)h[0];                                                                                         \
    }

DDL__DEFINE_HALF(ddl__f16, DDL__F16)
DDL__DEFINE_HALF(ddl__bf16, DDL__BF16)

/* Conversion of arrays, which must not overlap. */
typedef void (*ddl__cast_fn)(void *dst, const void *src, size_t count);

#define DDL__DEFINE_WIDEN(L, target, E, W, WIDEN)                                                                      \
    target static void E##_widen_##L(void *dst, const void *src, size_t count) {                                       \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        float *d = dst;                                                                                                \
        const char *s = src;                                                                                           \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__half_v##W h = *(const ddl__half_v##W *)(const void *)(s + 2 * i);                                     \
            ddl__f32_v##W f;                                                                                           \
            WIDEN(W, f, h);                                                                                            \
            DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                        \
            *(ddl__f32_v##W *)(void *)(d + i) = f;                                                                     \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            uint16_t h;                                                                                                \
            memcpy(&h, s + 2 * i, 2);                                                                                  \
            d[i] = E##_to_f32(h);                                                                                      \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__DEFINE_NARROW(L, target, E, W, NARROW)                                                                    \
    target static void E##_narrow_##L(void *dst, const void *src, size_t count) {                                      \
        const size_t lanes = sizeof(ddl__f32_v##W) / sizeof(float);                                                    \
        char *d = dst;                                                                                                 \
        const float *s = src;                                                                                          \
        size_t i = 0;                                                                                                  \
        for (; count - i >= lanes; i += lanes) {                                                                       \
            ddl__f32_v##W f = *(const ddl__f32_v##W *)(const void *)(s + i);                                           \
            ddl__half_v##W h;                                                                                          \
            NARROW(W, h, f);                                                                                           \
            *(ddl__half_v##W *)(void *)(d + 2 * i) = h;                                                                \
        }                                                                                                              \
        for (; i < count; i++) {                                                                                       \
            uint16_t h = E##_from_f32(s[i]);                                                                           \
            memcpy(d + 2 * i, &h, 2);                                                                                  \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }

/* The conversions of vectors.h on halves that lie one by one. */
#define DDL__F16_WIDEN_ARRAY(W, f, h)                                                                                  \
    do {                                                                                                               \
        ddl__f32_u##W word_ = __builtin_convertvector(h, ddl__f32_u##W);                                               \
        DDL__F16_WIDEN(W, f, word_);                                                                                   \
    } while (0)
#define DDL__F16_NARROW_ARRAY(W, h, f)                                                                                 \
    do {                                                                                                               \
        ddl__f32_u##W word_;                                                                                           \
        DDL__F16_NARROW(W, word_, f);                                                                                  \
        (h) = __builtin_convertvector(word_, ddl__half_v##W);                                                          \
    } while (0)
#define DDL__BF16_WIDEN_ARRAY(W, f, h) DDL__BF16_WIDEN(W, f, __builtin_convertvector(h, ddl__f32_u##W))
#define DDL__BF16_NARROW_ARRAY(W, h, f)                                                                                \
    do {                                                                                                               \
        ddl__f32_u##W word_;                                                                                           \
        DDL__BF16_NARROW(W, word_, f);                                                                                 \
        (h) = __builtin_convertvector(word_, ddl__half_v##W);                                                          \
    } while (0)

/* Kernels convert vectors of packed halves: OPEN makes two f32 vectors of one (here: of the low and of the high half of
 * each word), CLOSE rounds them back to where they came from. */
#define DDL__PACKED_OPEN(W, low, high, x, WIDEN)                                                                       \
    do {                                                                                                               \
        WIDEN(W, low, (x));                                                                                            \
        WIDEN(W, high, ((x) >> 16));                                                                                   \
    } while (0)
#define DDL__PACKED_CLOSE(W, r, low, high, NARROW)                                                                     \
    do {                                                                                                               \
        ddl__f32_u##W rl_, rh_;                                                                                        \
        NARROW(W, rl_, low);                                                                                           \
        NARROW(W, rh_, high);                                                                                          \
        (r) = rl_ | (rh_ << 16);                                                                                       \
    } while (0)
#define DDL__F16_BITS_OPEN(W, low, high, x) DDL__PACKED_OPEN(W, low, high, x, DDL__F16_WIDEN)
#define DDL__F16_BITS_CLOSE(W, r, low, high) DDL__PACKED_CLOSE(W, r, low, high, DDL__F16_NARROW)
#define DDL__BF16_OPEN(W, low, high, x) DDL__PACKED_OPEN(W, low, high, x, DDL__BF16_WIDEN)
#define DDL__BF16_CLOSE(W, r, low, high) DDL__PACKED_CLOSE(W, r, low, high, DDL__BF16_NARROW)

#if defined(__x86_64__)
/* F16C rounds as its immediate says (0 = to nearest even), whatever the modes of the thread. It keeps a part of a NaN's
 * payload, hence the step before. */
#define DDL__F16C_WIDEN(W, f, h) ((f) = (ddl__f32_v32)_mm256_cvtph_ps((__m128i)(h)))
#define DDL__F16C_NARROW(W, h, f)                                                                                      \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                            \
        (h) = (ddl__half_v32)_mm256_cvtps_ph((__m256)(f), 0);                                                          \
    } while (0)
/* 16 bytes of halves make one 32-byte vector, so that there is no high part. */
#define DDL__F16C_OPEN(W, low, high, x) ((low) = (ddl__f32_v32)_mm256_cvtph_ps((__m128i)(x)))
#define DDL__F16C_CLOSE(W, r, low, high)                                                                               \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, 32, low);                                                                         \
        (r) = (ddl__f16_v16)_mm256_cvtps_ph((__m256)(low), 0);                                                         \
    } while (0)

/* AVX512-BF16 rounds 32 values at once, but takes subnormals for zero and keeps a part of a NaN's payload. Vectors that
 * hold such a value, which are rare, are rounded by the bits. The instruction puts the low halves before the high
 * ones; the permutation makes them pairs again. */
#define DDL__NAN_OR_SUBNORMAL 0xa1
#define DDL__BF16_PAIRS                                                                                                \
    (ddl__f32_u64){0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005, 0x00160006, 0x00170007,     \
                   0x00180008, 0x00190009, 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f}
#define DDL__BF16_512_CLOSE(W, r, low, high)                                                                           \
    do {                                                                                                               \
        __mmask16 low_odd_ = _mm512_fpclass_ps_mask((__m512)(low), DDL__NAN_OR_SUBNORMAL);                             \
        __mmask16 high_odd_ = _mm512_fpclass_ps_mask((__m512)(high), DDL__NAN_OR_SUBNORMAL);                           \
        if (__builtin_expect((low_odd_ | high_odd_) != 0, 0)) {                                                        \
            DDL__BF16_CLOSE(W, r, low, high);                                                                          \
        } else {                                                                                                       \
            __m512i both_ = (__m512i)_mm512_cvtne2ps_pbh((__m512)(high), (__m512)(low));                               \
            (r) = (ddl__bf16_v64)_mm512_permutexvar_epi16((__m512i)DDL__BF16_PAIRS, both_);                            \
        }                                                                                                              \
    } while (0)
#endif

/* The portable level of f16. Every 64-bit Arm converts it in hardware; others do it bit by bit. A lone half is cheapest
 * in a full vector (F16_TAIL) where there is an instruction. */
#if defined(__aarch64__) && !defined(__AARCH64EB__)
#define DDL__F16_TAIL 16
#define DDL__F16_WIDEN_VECTOR(W, f, h) ((f) = (ddl__f32_v16)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)(h))))
#define DDL__F16_NARROW_VECTOR(W, h, f)                                                                                \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, f);                                                                            \
        (h) = (ddl__half_v16)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(f)));                                     \
    } while (0)
#define DDL__F16_OPEN(W, low, high, x)                                                                                 \
    do {                                                                                                               \
        float16x8_t both_ = vreinterpretq_f16_u32((uint32x4_t)(x));                                                    \
        (low) = (ddl__f32_v16)vcvt_f32_f16(vget_low_f16(both_));                                                       \
        (high) = (ddl__f32_v16)vcvt_high_f32_f16(both_);                                                               \
    } while (0)
#define DDL__F16_CLOSE(W, r, low, high)                                                                                \
    do {                                                                                                               \
        DDL__CANONICAL_NAN(ddl__f32, W, low);                                                                          \
        DDL__CANONICAL_NAN(ddl__f32, W, high);                                                                         \
        float16x4_t low_ = vcvt_f16_f32((float32x4_t)(low));                                                           \
        (r) = (ddl__f16_v16)vreinterpretq_u32_f16(vcvt_high_f16_f32(low_, (float32x4_t)(high)));                       \
    } while (0)
#else
#define DDL__F16_TAIL 1
#define DDL__F16_WIDEN_VECTOR DDL__F16_WIDEN_ARRAY
#define DDL__F16_NARROW_VECTOR DDL__F16_NARROW_ARRAY
#define DDL__F16_OPEN DDL__F16_BITS_OPEN
#define DDL__F16_CLOSE DDL__F16_BITS_CLOSE
#endif

DDL__DEFINE_WIDEN(portable, , ddl__f16, 16, DDL__F16_WIDEN_VECTOR)
DDL__DEFINE_WIDEN(portable, , ddl__bf16, 16, DDL__BF16_WIDEN_ARRAY)
DDL__DEFINE_NARROW(portable, , ddl__f16, 16, DDL__F16_NARROW_VECTOR)
DDL__DEFINE_NARROW(portable, , ddl__bf16, 16, DDL__BF16_NARROW_ARRAY)
#if defined(__x86_64__)
DDL__DEFINE_WIDEN(avx2, DDL__AVX2, ddl__f16, 32, DDL__F16C_WIDEN)
DDL__DEFINE_WIDEN(avx2, DDL__AVX2, ddl__bf16, 32, DDL__BF16_WIDEN_ARRAY)
DDL__DEFINE_NARROW(avx2, DDL__AVX2, ddl__f16, 32, DDL__F16C_NARROW)
DDL__DEFINE_NARROW(avx2, DDL__AVX2, ddl__bf16, 32, DDL__BF16_NARROW_ARRAY)
#endif

/* The function that turns an array of f16 or bf16 into f32. */
static inline ddl__cast_fn ddl__widen_at(ddl__cpu level, ddl_dtype half) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return half == DDL_F16 ? ddl__f16_widen_avx2 : ddl__bf16_widen_avx2;
    }
#endif
    (void)level;
    return half == DDL_F16 ? ddl__f16_widen_portable : ddl__bf16_widen_portable;
}

/* The function that rounds an array of f32 to f16 or bf16. */
static inline ddl__cast_fn ddl__narrow_at(ddl__cpu level, ddl_dtype half) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return half == DDL_F16 ? ddl__f16_narrow_avx2 : ddl__bf16_narrow_avx2;
    }
#endif
    (void)level;
    return half == DDL_F16 ? ddl__f16_narrow_portable : ddl__bf16_narrow_portable;
}

/* >>dtype/kernels */
/* dtype/kernels: dst = a op b for every type and op, and the table that finds the function.
 * Must not know: how many ranks there are, or what a group is.
 *
 * Promise: a op b and b op a have the same bits, on every level and processor. IEEE addition, multiplication and
 * comparison give that for numbers; every NaN result has all bits set; zeros order as -0 < +0 in min and max, where
 * a NaN operand wins. Integers wrap: they are added and multiplied unsigned.
 * What can void it: -ffast-math for the file of the implementation (NaN, signed zeros), and ranks whose threads run in
 * different rounding or flush-to-zero modes. With denormals-are-zero set, min and max may mix the bits of two subnormal
 * operands, which that mode counts as the same zero. */

/* dst[i] = a[i] op b[i]. dst is a, or b, or overlaps neither; the pointers may be odd. */
typedef void (*ddl__reduce_fn)(void *dst, const void *a, const void *b, size_t count);

/* What an op does to one vector: r = x op y. */
#define DDL__DO_SUM(E, W, r, x, y) ((r) = (x) + (y))
#define DDL__DO_PROD(E, W, r, x, y) ((r) = (x) * (y))
#define DDL__DO_DIV(E, W, r, x, y) ((r) = (x) / (y))
#define DDL__DO_BAND(E, W, r, x, y) ((r) = (x) & (y))
#define DDL__DO_BOR(E, W, r, x, y) ((r) = (x) | (y))
#define DDL__DO_BXOR(E, W, r, x, y) ((r) = (x) ^ (y))
/* Comparisons give all bits set for true. */
#define DDL__DO_LAND(E, W, r, x, y) ((r) = (E##_v##W)((x) != 0) & (E##_v##W)((y) != 0) & 1)
#define DDL__DO_LOR(E, W, r, x, y) ((r) = (E##_v##W)(((x) | (y)) != 0) & 1)
#define DDL__DO_LXOR(E, W, r, x, y) ((r) = ((E##_v##W)((x) != 0) ^ (E##_v##W)((y) != 0)) & 1)
#define DDL__DO_MIN(E, W, r, x, y)                                                                                     \
    do {                                                                                                               \
        E##_v##W take_ = (E##_v##W)((x) < (y));                                                                        \
        (r) = ((x) & take_) | ((y) & ~take_);                                                                          \
    } while (0)
#define DDL__DO_MAX(E, W, r, x, y)                                                                                     \
    do {                                                                                                               \
        E##_v##W take_ = (E##_v##W)((x) > (y));                                                                        \
        (r) = ((x) & take_) | ((y) & ~take_);                                                                          \
    } while (0)

/* Floats. DDL__DIRECT_FLOAT or CLOSE makes a NaN canonical afterwards.
 * Neither less nor greater means equal or NaN: then both operands pass and are or-ed, which makes -0 of two different
 * zeros and keeps a NaN a NaN. */
#define DDL__DO_FMIN(E, W, r, x, y)                                                                                    \
    do {                                                                                                               \
        E##_u##W less_ = (E##_u##W)((x) < (y)), more_ = (E##_u##W)((x) > (y));                                         \
        (r) = (E##_v##W)(((E##_u##W)(x) & ~more_) | ((E##_u##W)(y) & ~less_));                                         \
    } while (0)
/* The mirror image: both operands are and-ed, which makes +0 of two different zeros but may lose a NaN, so that the
 * operands have to be asked. */
#define DDL__DO_FMAX(E, W, r, x, y)                                                                                    \
    do {                                                                                                               \
        E##_u##W less_ = (E##_u##W)((x) < (y)), more_ = (E##_u##W)((x) > (y));                                         \
        E##_u##W nan_ = (E##_u##W)((x) != (x)) | (E##_u##W)((y) != (y));                                               \
        E##_u##W both_ = ((E##_u##W)(x) | less_) & ((E##_u##W)(y) | more_);                                            \
        (r) = (E##_v##W)(both_ | nan_);                                                                                \
    } while (0)

/* How an op is applied to vectors as they lie in memory: directly, or to halves widened to f32 and rounded once. */
#define DDL__DIRECT(DO, E, W, r, x, y) DO(E, W, r, x, y)
#define DDL__DIRECT_FLOAT(DO, E, W, r, x, y)                                                                           \
    do {                                                                                                               \
        DO(E, W, r, x, y);                                                                                             \
        DDL__CANONICAL_NAN(E, W, r);                                                                                   \
    } while (0)
/* Halves are widened to vectors of F bytes: a low and a high one, or with F16C a single one. */
#define DDL__BOTH_PARTS(...) __VA_ARGS__
#define DDL__ONE_PART(...)
#define DDL__WIDENED(DO, F, PARTS, W, r, x, y, OPEN, CLOSE)                                                            \
    do {                                                                                                               \
        ddl__f32_v##F xl_, yl_, sl_;                                                                                   \
        PARTS(ddl__f32_v##F xh_, yh_, sh_;)                                                                            \
        OPEN(W, xl_, xh_, x);                                                                                          \
        OPEN(W, yl_, yh_, y);                                                                                          \
        DO(ddl__f32, F, sl_, xl_, yl_);                                                                                \
        PARTS(DO(ddl__f32, F, sh_, xh_, yh_);)                                                                         \
        CLOSE(W, r, sl_, sh_);                                                                                         \
    } while (0)
#define DDL__F16_APPLY(DO, E, W, r, x, y)                                                                              \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__F16_OPEN, DDL__F16_CLOSE)
#define DDL__BF16_APPLY(DO, E, W, r, x, y)                                                                             \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__BF16_OPEN, DDL__BF16_CLOSE)
#define DDL__BF16_512_APPLY(DO, E, W, r, x, y)                                                                         \
    DDL__WIDENED(DO, W, DDL__BOTH_PARTS, W, r, x, y, DDL__BF16_OPEN, DDL__BF16_512_CLOSE)
#define DDL__F16C_APPLY(DO, E, W, r, x, y)                                                                             \
    DDL__WIDENED(DO, 32, DDL__ONE_PART, W, r, x, y, DDL__F16C_OPEN, DDL__F16C_CLOSE)

/* Vectors lie in memory as they are; a single element is the first of a vector that is otherwise zero. */
#define DDL__LOAD_VECTOR(E, W, x, p) ((x) = *(const E##_v##W *)(const void *)(p))
#define DDL__STORE_VECTOR(E, W, p, x) (*(E##_v##W *)(void *)(p) = (x))
#define DDL__LOAD_ELEMENT(E, W, x, p)                                                                                  \
    do {                                                                                                               \
        E##_element one_;                                                                                              \
        memcpy(&one_, (p), sizeof(one_));                                                                              \
        (x) = (E##_v##W){one_};                                                                                        \
    } while (0)
#define DDL__STORE_ELEMENT(E, W, p, x)                                                                                 \
    do {                                                                                                               \
        E##_element one_ = (E##_element)(x)[0];                                                                        \
        memcpy((p), &one_, sizeof(one_));                                                                              \
    } while (0)

/* The first bytes of a vector, as the variable `rest` says; the others are zero and stay as they are in memory. */
#define DDL__LOAD_REST(E, W, x, p) ((x) = (E##_v##W)_mm512_maskz_loadu_epi8(rest, (p)))
#define DDL__STORE_REST(E, W, p, x) _mm512_mask_storeu_epi8((p), rest, (__m512i)(x))

/* Both operands are loaded before the store, which makes dst == a and dst == b safe. */
#define DDL__STEP(WHAT, APPLY, DO, E, W, at)                                                                           \
    do {                                                                                                               \
        E##_v##W x, y, r;                                                                                              \
        DDL__LOAD_##WHAT(E, W, x, p + (at));                                                                           \
        DDL__LOAD_##WHAT(E, W, y, q + (at));                                                                           \
        APPLY(DO, E, W, r, x, y);                                                                                      \
        DDL__STORE_##WHAT(E, W, d + (at), r);                                                                          \
    } while (0)

/* What is less than a vector: single elements by the same text in vectors of width TAIL (a lone half is the low one of
 * a word whose other half is zero), or where there are masks a part of a vector. */
#define DDL__REST_portable(E, W, TAIL, APPLY, DO)                                                                      \
    for (; i < bytes; i += sizeof(E##_element)) {                                                                      \
        DDL__STEP(ELEMENT, APPLY, DO, E, TAIL, i);                                                                     \
    }
#define DDL__REST_avx2 DDL__REST_portable
#define DDL__REST_avx512(E, W, TAIL, APPLY, DO)                                                                        \
    if (i < bytes) {                                                                                                   \
        __mmask64 rest = ((uint64_t)1 << (bytes - i)) - 1;                                                             \
        DDL__STEP(REST, APPLY, DO, E, W, i);                                                                           \
    }

/* The one loop of all kernels: four vectors at a time (enough to keep loads and stores busy; more only adds code), then
 * one, then the rest. */
#define DDL__DEFINE_KERNEL(name, L, target, E, W, TAIL, APPLY, DO)                                                     \
    target static void E##_##name##_##L(void *dst, const void *a, const void *b, size_t count) {                       \
        char *d = dst;                                                                                                 \
        const char *p = a, *q = b;                                                                                     \
        size_t i = 0, bytes = count * sizeof(E##_element);                                                             \
        for (; bytes - i >= 4 * (W); i += 4 * (W)) {                                                                   \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i);                                                                     \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + (W));                                                               \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + 2 * (W));                                                           \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i + 3 * (W));                                                           \
        }                                                                                                              \
        for (; bytes - i >= (W); i += (W)) {                                                                           \
            DDL__STEP(VECTOR, APPLY, DO, E, W, i);                                                                     \
        }                                                                                                              \
        DDL__REST_##L(E, W, TAIL, APPLY, DO)                                                                           \
        DDL__LEAVE_##L;                                                                                                \
    }

#define DDL__FLOAT_KERNELS(L, target, E, W, TAIL, APPLY)                                                               \
    DDL__DEFINE_KERNEL(sum, L, target, E, W, TAIL, APPLY, DDL__DO_SUM)                                                 \
    DDL__DEFINE_KERNEL(prod, L, target, E, W, TAIL, APPLY, DDL__DO_PROD)                                               \
    DDL__DEFINE_KERNEL(min, L, target, E, W, TAIL, APPLY, DDL__DO_FMIN)                                                \
    DDL__DEFINE_KERNEL(max, L, target, E, W, TAIL, APPLY, DDL__DO_FMAX)

#define DDL__KERNEL(L, target, E, W, name, DO) DDL__DEFINE_KERNEL(name, L, target, E, W, 1, DDL__DIRECT, DO)

/* Only order tells a signed type from an unsigned one of its size; the rest is shared. */
#define DDL__ORDER_KERNELS(L, target, E, W)                                                                            \
    DDL__KERNEL(L, target, E, W, min, DDL__DO_MIN)                                                                     \
    DDL__KERNEL(L, target, E, W, max, DDL__DO_MAX)
#define DDL__INTEGER_KERNELS(L, target, E, SIGNED, W)                                                                  \
    DDL__KERNEL(L, target, E, W, sum, DDL__DO_SUM)                                                                     \
    DDL__KERNEL(L, target, E, W, prod, DDL__DO_PROD)                                                                   \
    DDL__KERNEL(L, target, E, W, band, DDL__DO_BAND)                                                                   \
    DDL__KERNEL(L, target, E, W, bor, DDL__DO_BOR)                                                                     \
    DDL__KERNEL(L, target, E, W, bxor, DDL__DO_BXOR)                                                                   \
    DDL__KERNEL(L, target, E, W, land, DDL__DO_LAND)                                                                   \
    DDL__KERNEL(L, target, E, W, lor, DDL__DO_LOR)                                                                     \
    DDL__KERNEL(L, target, E, W, lxor, DDL__DO_LXOR)                                                                   \
    DDL__ORDER_KERNELS(L, target, E, W)                                                                                \
    DDL__ORDER_KERNELS(L, target, SIGNED, W)

/* All kernels of a level, f16 apart. */
#define DDL__LEVEL_KERNELS(L, target, W)                                                                               \
    DDL__FLOAT_KERNELS(L, target, ddl__f32, W, 1, DDL__DIRECT_FLOAT)                                                   \
    DDL__FLOAT_KERNELS(L, target, ddl__f64, W, 1, DDL__DIRECT_FLOAT)                                                   \
    DDL__FLOAT_KERNELS(L, target, ddl__bf16, W, 1, DDL__BF16_APPLY)                                                    \
    DDL__DEFINE_KERNEL(div, L, target, ddl__f32, W, 1, DDL__DIRECT_FLOAT, DDL__DO_DIV)                                 \
    DDL__DEFINE_KERNEL(div, L, target, ddl__f64, W, 1, DDL__DIRECT_FLOAT, DDL__DO_DIV)                                 \
    DDL__INTEGER_KERNELS(L, target, ddl__u8, ddl__i8, W)                                                               \
    DDL__INTEGER_KERNELS(L, target, ddl__u32, ddl__i32, W)                                                             \
    DDL__INTEGER_KERNELS(L, target, ddl__u64, ddl__i64, W)

DDL__LEVEL_KERNELS(portable, , 16)
DDL__FLOAT_KERNELS(portable, , ddl__f16, 16, DDL__F16_TAIL, DDL__F16_APPLY)
#if defined(__x86_64__)
DDL__LEVEL_KERNELS(avx2, DDL__AVX2, 32)
DDL__FLOAT_KERNELS(avx2, DDL__AVX2, ddl__f16, 16, 16, DDL__F16C_APPLY)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__f32, 64, , DDL__DIRECT_FLOAT)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__f64, 64, , DDL__DIRECT_FLOAT)
DDL__FLOAT_KERNELS(avx512, DDL__AVX512, ddl__bf16, 64, , DDL__BF16_512_APPLY)
#endif

/* >>dtype/pairs */
/* dtype/pairs: MIN_INDEX and MAX_INDEX, which keep the index (often the rank) beside the value.
 * Must not know: where indices come from. */

#define DDL__LESS(a, b) ((a) < (b))
#define DDL__MORE(a, b) ((a) > (b))
#define DDL__IS_NAN(x) ((x) != (x))
#define DDL__NO_NAN(x) 0

/* a wins if its value is better, or it alone is a NaN, or the values tie and its index is smaller. Two zeros of
 * different sign tie; with one index too, the larger bits win, so that the order of operands never shows.
 * Branch-free on purpose: which side wins is unpredictable. */
#define DDL__PAIR_KERNEL(fn, value, word, index, BETTER, NAN)                                                          \
    static void fn(void *dst, const void *a, const void *b, size_t count) {                                            \
        enum { half = sizeof(value), pair = 2 * sizeof(value) };                                                       \
        char *d = dst;                                                                                                 \
        const char *p = a, *q = b;                                                                                     \
        for (size_t i = 0; i < count; i++, d += pair, p += pair, q += pair) {                                          \
            value va, vb;                                                                                              \
            word wa, wb;                                                                                               \
            index ia, ib;                                                                                              \
            memcpy(&va, p, half);                                                                                      \
            memcpy(&vb, q, half);                                                                                      \
            memcpy(&wa, p, half);                                                                                      \
            memcpy(&wb, q, half);                                                                                      \
            memcpy(&ia, p + half, half);                                                                               \
            memcpy(&ib, q + half, half);                                                                               \
            int nan_a = NAN(va), nan_b = NAN(vb);                                                                      \
            int tie = (va == vb) | (nan_a & nan_b), first = (ia < ib) | ((ia == ib) & (wa >= wb));                     \
            int take_a = BETTER(va, vb) | (nan_a & !nan_b) | (tie & first);                                            \
            word w = nan_a | nan_b ? (word)-1 : take_a ? wa : wb;                                                      \
            index k = take_a ? ia : ib;                                                                                \
            memcpy(d, &w, half);                                                                                       \
            memcpy(d + half, &k, half);                                                                                \
        }                                                                                                              \
    }

#define DDL__PAIR_KERNELS(name, value, word, index, NAN)                                                               \
    DDL__PAIR_KERNEL(ddl__##name##_min_index, value, word, index, DDL__LESS, NAN)                                      \
    DDL__PAIR_KERNEL(ddl__##name##_max_index, value, word, index, DDL__MORE, NAN)

DDL__PAIR_KERNELS(f32_i32, float, uint32_t, int32_t, DDL__IS_NAN)
DDL__PAIR_KERNELS(f64_i64, double, uint64_t, int64_t, DDL__IS_NAN)
DDL__PAIR_KERNELS(i32_i32, int32_t, uint32_t, int32_t, DDL__NO_NAN)
DDL__PAIR_KERNELS(i64_i64, int64_t, uint64_t, int64_t, DDL__NO_NAN)

/* >>dtype/reduce */
/* dtype/reduce: what the rooms above call: find a kernel, scale, average.
 * Must not know: ranks, groups, messages. Every function here is pure: no state, any thread. */

#define DDL__FLOAT_ROW(E, L)                                                                                           \
    {[DDL_SUM] = E##_sum_##L, [DDL_PROD] = E##_prod_##L, [DDL_MIN] = E##_min_##L, [DDL_MAX] = E##_max_##L,             \
     [DDL_AVG] = E##_sum_##L}
#define DDL__INTEGER_ROW(E, ORDER, L)                                                                                  \
    {[DDL_SUM] = E##_sum_##L,   [DDL_PROD] = E##_prod_##L, [DDL_MIN] = ORDER##_min_##L, [DDL_MAX] = ORDER##_max_##L,   \
     [DDL_AVG] = E##_sum_##L,   [DDL_BAND] = E##_band_##L, [DDL_BOR] = E##_bor_##L,     [DDL_BXOR] = E##_bxor_##L,     \
     [DDL_LAND] = E##_land_##L, [DDL_LOR] = E##_lor_##L,   [DDL_LXOR] = E##_lxor_##L}
/* A bool is any byte; the result is 0 or 1, also of the bitwise ops. */
#define DDL__BOOL_ROW(L)                                                                                               \
    {[DDL_SUM] = ddl__u8_lor_##L,   [DDL_PROD] = ddl__u8_land_##L, [DDL_MIN] = ddl__u8_land_##L,                       \
     [DDL_MAX] = ddl__u8_lor_##L,   [DDL_BAND] = ddl__u8_land_##L, [DDL_BOR] = ddl__u8_lor_##L,                        \
     [DDL_BXOR] = ddl__u8_lxor_##L, [DDL_LAND] = ddl__u8_land_##L, [DDL_LOR] = ddl__u8_lor_##L,                        \
     [DDL_LXOR] = ddl__u8_lxor_##L}
#define DDL__PAIR_ROW(name)                                                                                            \
    {[DDL_MIN_INDEX] = ddl__##name##_min_index, [DDL_MAX_INDEX] = ddl__##name##_max_index}
/* F: the level of f32, f64 and bf16, L: that of the others. */
#define DDL__LEVEL_TABLE(F, L)                                                                                         \
    {[DDL_F16] = DDL__FLOAT_ROW(ddl__f16, L),                                                                          \
     [DDL_BF16] = DDL__FLOAT_ROW(ddl__bf16, F),                                                                        \
     [DDL_F32] = DDL__FLOAT_ROW(ddl__f32, F),                                                                          \
     [DDL_F64] = DDL__FLOAT_ROW(ddl__f64, F),                                                                          \
     [DDL_I8] = DDL__INTEGER_ROW(ddl__u8, ddl__i8, L),                                                                 \
     [DDL_U8] = DDL__INTEGER_ROW(ddl__u8, ddl__u8, L),                                                                 \
     [DDL_I32] = DDL__INTEGER_ROW(ddl__u32, ddl__i32, L),                                                              \
     [DDL_U32] = DDL__INTEGER_ROW(ddl__u32, ddl__u32, L),                                                              \
     [DDL_I64] = DDL__INTEGER_ROW(ddl__u64, ddl__i64, L),                                                              \
     [DDL_U64] = DDL__INTEGER_ROW(ddl__u64, ddl__u64, L),                                                              \
     [DDL_BOOL] = DDL__BOOL_ROW(L),                                                                                    \
     [DDL_F32_I32] = DDL__PAIR_ROW(f32_i32),                                                                           \
     [DDL_F64_I64] = DDL__PAIR_ROW(f64_i64),                                                                           \
     [DDL_I32_I32] = DDL__PAIR_ROW(i32_i32),                                                                           \
     [DDL_I64_I64] = DDL__PAIR_ROW(i64_i64)}

/* The kernel of an op at a level; NULL where the op is not defined for the type (see ddl__op_valid). AVG gives the
 * kernel of SUM: the division comes once, at the end (ddl__average). A level this machine lacks must not be run. */
static inline ddl__reduce_fn ddl__reduce_kernel_at(ddl__cpu level, ddl_dtype dtype, ddl_op op) {
    static const ddl__reduce_fn table[][DDL__DTYPES][DDL__OPS] = {
        [DDL__CPU_PORTABLE] = DDL__LEVEL_TABLE(portable, portable),
#if defined(__x86_64__)
        [DDL__CPU_AVX2] = DDL__LEVEL_TABLE(avx2, avx2),
        [DDL__CPU_AVX512] = DDL__LEVEL_TABLE(avx512, avx2),
#endif
    };
    if (!ddl__dtype_known(dtype) || op <= DDL_OP_NONE || op >= DDL__OPS ||
        (size_t)level >= sizeof(table) / sizeof(table[0])) {
        return NULL;
    }
    return table[level][dtype][op];
}

static inline ddl__reduce_fn ddl__reduce_kernel(ddl_dtype dtype, ddl_op op) {
    return ddl__reduce_kernel_at(ddl__cpu_level(), dtype, op);
}

/* The kernel of a division of f32 or f64; no op of the interface, averages need it. */
static inline ddl__reduce_fn ddl__divide_kernel_at(ddl__cpu level, ddl_dtype dtype) {
#if defined(__x86_64__)
    if (level >= DDL__CPU_AVX2) {
        return dtype == DDL_F32 ? ddl__f32_div_avx2 : ddl__f64_div_avx2;
    }
#endif
    (void)level;
    return dtype == DDL_F32 ? ddl__f32_div_portable : ddl__f64_div_portable;
}

/* Work is cut into pieces whose temporaries stay in the first-level cache, on the stack. */
enum { DDL__BLOCK_BYTES = 4096, DDL__BLOCK_F32 = DDL__BLOCK_BYTES / 4, DDL__BLOCK_F64 = DDL__BLOCK_BYTES / 8 };

/* One block: dst = src kernel factors, where kernel multiplies or divides; halves through f32. */
static inline void ddl__apply_block(char *dst, const char *src, size_t count, ddl_dtype dtype, const void *factors,
                                    ddl__reduce_fn kernel) {
    if (!ddl__dtype_is_half(dtype)) {
        kernel(dst, src, factors, count);
        return;
    }
    float wide[DDL__BLOCK_F32];
    ddl__cpu level = ddl__cpu_level();
    ddl__widen_at(level, dtype)(wide, src, count);
    kernel(wide, wide, factors, count);
    ddl__narrow_at(level, dtype)(dst, wide, count);
}

/* dst = src * factor, or src / factor, for every float type. The factor is spread over a block so that the kernels of
 * two operands serve. For f16 and bf16 it stays an f32, since 1/3 rounded to bf16 would be good for two digits only. */
static inline void ddl__apply_float(void *dst, const void *src, size_t count, ddl_dtype dtype, double factor,
                                    int divide) {
    union {
        float f32[DDL__BLOCK_F32];
        double f64[DDL__BLOCK_F64];
    } factors;
    ddl_dtype wide = dtype == DDL_F64 ? DDL_F64 : DDL_F32;
    ddl__cpu level = ddl__cpu_level();
    ddl__reduce_fn kernel = divide ? ddl__divide_kernel_at(level, wide) : ddl__reduce_kernel_at(level, wide, DDL_PROD);
    size_t step = wide == DDL_F64 ? DDL__BLOCK_F64 : DDL__BLOCK_F32, size = ddl__dtype_bytes(dtype);
    for (size_t i = 0; i < step && i < count; i++) {
        if (wide == DDL_F64) {
            factors.f64[i] = factor;
        } else {
            factors.f32[i] = (float)factor;
        }
    }
    for (size_t i = 0; i < count; i += step) {
        ddl__apply_block((char *)dst + i * size, (const char *)src + i * size, count - i < step ? count - i : step,
                         dtype, &factors, kernel);
    }
}

/* Integers. A whole factor multiplies exactly and wraps like a sum of that many terms; another one goes through double,
 * truncates toward zero and saturates (a plain cast would be undefined there); NaN gives 0. */
#define DDL__SCALE_INTEGER(E, type, word, least, most)                                                                 \
    static inline void E##_scale(char *dst, const char *src, size_t count, double factor) {                            \
        int whole = factor >= -0x1p62 && factor <= 0x1p62 && (double)(int64_t)factor == factor;                        \
        uint64_t times = whole ? (uint64_t)(int64_t)factor : 0;                                                        \
        for (size_t i = 0; i < count; i++) {                                                                           \
            type x;                                                                                                    \
            memcpy(&x, src + i * sizeof(x), sizeof(x));                                                                \
            double y = (double)x * factor;                                                                             \
            if (whole) {                                                                                               \
                x = (type)(word)((uint64_t)x * times);                                                                 \
            } else if (y > (double)(least) && y < (double)(most)) {                                                    \
                x = (type)y;                                                                                           \
            } else {                                                                                                   \
                x = y >= (double)(most) ? (most) : y <= (double)(least) ? (least) : 0;                                 \
            }                                                                                                          \
            memcpy(dst + i * sizeof(x), &x, sizeof(x));                                                                \
        }                                                                                                              \
    }
/* The quotient is formed in 64 bits, because n need not fit the type. */
#define DDL__AVERAGE_INTEGER(E, type, wide)                                                                            \
    static inline void E##_average(char *data, size_t count, int n) {                                                  \
        for (size_t i = 0; i < count; i++) {                                                                           \
            type x;                                                                                                    \
            memcpy(&x, data + i * sizeof(x), sizeof(x));                                                               \
            x = (type)((wide)x / (wide)n);                                                                             \
            memcpy(data + i * sizeof(x), &x, sizeof(x));                                                               \
        }                                                                                                              \
    }
#define DDL__INTEGERS(X)                                                                                               \
    X(DDL_I8, ddl__i8, int8_t, uint8_t, int64_t, INT8_MIN, INT8_MAX)                                                   \
    X(DDL_U8, ddl__u8, uint8_t, uint8_t, uint64_t, 0, UINT8_MAX)                                                       \
    X(DDL_I32, ddl__i32, int32_t, uint32_t, int64_t, INT32_MIN, INT32_MAX)                                             \
    X(DDL_U32, ddl__u32, uint32_t, uint32_t, uint64_t, 0, UINT32_MAX)                                                  \
    X(DDL_I64, ddl__i64, int64_t, uint64_t, int64_t, INT64_MIN, INT64_MAX)                                             \
    X(DDL_U64, ddl__u64, uint64_t, uint64_t, uint64_t, 0, UINT64_MAX)
#define DDL__DEFINE_INTEGER(dtype, E, type, word, wide, least, most)                                                   \
    DDL__SCALE_INTEGER(E, type, word, least, most)                                                                     \
    DDL__AVERAGE_INTEGER(E, type, wide)
DDL__INTEGERS(DDL__DEFINE_INTEGER)
#undef DDL__DEFINE_INTEGER

/* dst = src * factor; dst is src or overlaps it nowhere. bool and the pairs have no factor: they are copied. */
static inline void ddl__scale(void *dst, const void *src, size_t count, ddl_dtype dtype, double factor) {
    if (ddl__dtype_is_float(dtype)) {
        ddl__apply_float(dst, src, count, dtype, factor, 0);
        return;
    }
    switch (dtype) {
#define DDL__CASE(dtype, E, type, word, wide, least, most)                                                             \
    case dtype:                                                                                                        \
        E##_scale(dst, src, count, factor);                                                                            \
        return;
        DDL__INTEGERS(DDL__CASE)
#undef DDL__CASE
    default:
        memmove(dst, src, count * ddl__dtype_bytes(dtype));
    }
}

/* Divides the finished sum of n terms by n, in place. Floats divide rather than multiply by 1/n, so that the average of
 * equal values whose sum is exact is that value; integers truncate toward zero. n < 1, bool and the pairs: nothing. */
static inline void ddl__average(void *data, size_t count, ddl_dtype dtype, int n) {
    if (n <= 1) {
        return;
    }
    if (ddl__dtype_is_float(dtype)) {
        ddl__apply_float(data, data, count, dtype, n, 1);
        return;
    }
    switch (dtype) {
#define DDL__CASE(dtype, E, type, word, wide, least, most)                                                             \
    case dtype:                                                                                                        \
        E##_average(data, count, n);                                                                                   \
        return;
        DDL__INTEGERS(DDL__CASE)
#undef DDL__CASE
    default:
        return;
    }
}

/* >>plan */
/* plan: a collective as data. A plan is the list of steps that one rank takes, with their dependencies; algorithms
 * write plans, the engine runs them, the checker proves them. It must not know of sockets, requests or time. */

typedef enum ddl__step_kind {
    DDL__SEND = 1,        /* src -> peer */
    DDL__RECV = 2,        /* peer -> dst */
    DDL__RECV_REDUCE = 3, /* dst = src op what peer sent (DDL__THEIRS_FIRST: what peer sent op src) */
    DDL__COPY = 4,        /* dst = src */
    DDL__REDUCE = 5,      /* dst = src op dst (DDL__DST_FIRST: dst op src) */
    DDL__NATIVE = 6       /* a collective of this host's ranks, run by a transport: slot is its kind, peer its root */
} ddl__step_kind;

/* What an offset counts from. When a call is in place, the engine makes IN and OUT point at the same elements. */
typedef enum ddl__space { DDL__IN = 0, DDL__OUT = 1, DDL__TMP = 2 } ddl__space;

/* DDL__AT_ONCE: a send that does not wait for the fence. */
enum { DDL__THEIRS_FIRST = 1, DDL__DST_FIRST = 1, DDL__AT_ONCE = 2 };

#define DDL__EAGER_BYTES 65536 /* to a rank that may not have called yet */

typedef struct ddl__step {
    uint8_t kind, flags, src_space, dst_space;
    int32_t peer;  /* rank in the group */
    uint32_t slot; /* pairs a send with its receive: unique for (sender, receiver) within the operation */
    uint32_t waits;      /* how many steps must end before this one may start */
    uint32_t first_next; /* the steps that wait for this one: nexts[first_next .. + next_count - 1] of the plan */
    uint32_t next_count;
    int64_t src, dst; /* byte offsets */
    int64_t bytes;    /* 0 is a pure signal */
} ddl__step;

/* What an algorithm is told. count is elements of the smaller tensor, as in api.h. */
typedef struct ddl__plan_args {
    ddl_kind kind;
    int32_t size, rank, root;
    int32_t element_bytes;
    int64_t count;
    bool in_place;
    bool commutative;
    bool fence;          /* begin with a fence, see below */
    int64_t chunk_bytes; /* how finely to cut for pipelining; > 0 */
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets; /* v-forms; elements; offsets never NULL here */
    const int32_t *host_of; /* size entries: which host each rank is on, numbered from 0 by first appearance */
    double native_s;        /* how long a transport takes by itself, for the ranks of one host; 0: it cannot */
} ddl__plan_args;

/* What algorithms are told and the engine runs. All steps that wait for nothing start at once; a step that ends lets
 * go the steps that wait for it; the operation ends with its last step. A send reads its memory when it is let go and
 * ends when the memory may be reused; data that arrives before a receive is let go is kept by the engine.
 *
 * Two rules make a mismatched call harmless ("buffers untouched"; every message carries the signature of the call):
 * - barrier, all_reduce, all_gather, reduce_scatter, all_to_all, and every fenced plan: a step that writes OUT comes
 *   after a chain of messages from every rank;
 * - the rooted kinds and the scans, not fenced: it comes after a message from each rank that this rank ever receives
 *   from. The message that a receive itself waits for counts.
 * A plan that is not fenced sends so little that each send may count on ending before its receiver looks at it; a
 * fenced plan also ends when a send does not end before its receive has been let go, and sends at most
 * DDL__EAGER_BYTES to a rank that it has not heard of. */
typedef struct ddl__plan {
    const char *algorithm;
    ddl__step *steps;
    uint32_t *nexts;
    uint32_t step_count, next_count;
    int64_t tmp_bytes;
    bool fenced;
} ddl__plan;

/* >>plan-part: cutting memory. A span is bytes of a space, or of something that is mapped to one by a place. */
typedef struct ddl__span {
    int64_t at, bytes;
} ddl__span;

DDL_API ddl_status ddl_part(int64_t count, int32_t parts, int32_t index, int64_t *out_begin, int64_t *out_count) {
    if (count < 0 || parts < 1 || index < 0 || index >= parts || out_begin == NULL || out_count == NULL) {
        return DDL_ERR_ARG;
    }
    int64_t each = count / parts, more = count % parts;
    *out_begin = index * each + DDL__MIN((int64_t)index, more);
    *out_count = each + (index < more);
    return DDL_OK;
}

/* Parts first .. end-1 of a span that is cut into equal parts at borders of elements. */
static ddl__span ddl__span_parts(ddl__span whole, int32_t parts, int32_t first, int32_t end, int32_t element_bytes) {
    int64_t count = whole.bytes / element_bytes, each = count / parts, more = count % parts;
    int64_t begin = first * each + DDL__MIN((int64_t)first, more);
    int64_t stop = end * each + DDL__MIN((int64_t)end, more);
    return (ddl__span){whole.at + begin * element_bytes, (stop - begin) * element_bytes};
}

/* One part of the equal parts of a span. */
static ddl__span ddl__span_part(ddl__span whole, int32_t parts, int32_t index, int32_t element_bytes) {
    return ddl__span_parts(whole, parts, index, index + 1, element_bytes);
}

/* chunk_bytes in whole elements. */
static int64_t ddl__chunk_bytes(const ddl__plan_args *args) {
    int64_t elements = args->chunk_bytes / args->element_bytes;
    return DDL__MAX(elements, 1) * args->element_bytes;
}

/* An empty span has one empty chunk, so that loops over chunks still exchange a signal. */
static uint32_t ddl__chunk_count(const ddl__plan_args *args, int64_t bytes) {
    int64_t chunk = ddl__chunk_bytes(args);
    return bytes <= chunk ? 1 : (uint32_t)((bytes + chunk - 1) / chunk);
}

/* The last chunk is what is left. */
static ddl__span ddl__chunk(const ddl__plan_args *args, ddl__span span, uint32_t index) {
    int64_t chunk = ddl__chunk_bytes(args), skip = chunk * (int64_t)index;
    return (ddl__span){span.at + skip, DDL__MIN(chunk, span.bytes - skip)};
}

/* The v-form's kind without the v. */
static ddl_kind ddl__kind_base(ddl_kind kind) {
    switch (kind) {
    case DDL_GATHERV:
        return DDL_GATHER;
    case DDL_SCATTERV:
        return DDL_SCATTER;
    case DDL_ALL_GATHERV:
        return DDL_ALL_GATHER;
    case DDL_REDUCE_SCATTERV:
        return DDL_REDUCE_SCATTER;
    case DDL_ALL_TO_ALLV:
        return DDL_ALL_TO_ALL;
    default:
        return kind;
    }
}

/* What users call it, in DDL_ALGO and in sentences. */
static const char *ddl__kind_name(ddl_kind kind) {
    static const char *const names[] = {"?",           "barrier",        "broadcast",       "reduce",
                                        "all_reduce",  "gather",         "scatter",         "all_gather",
                                        "reduce_scatter", "all_to_all",  "scan",            "exscan",
                                        "gatherv",     "scatterv",       "all_gatherv",     "reduce_scatterv",
                                        "all_to_allv"};
    return kind > 0 && (size_t)kind < DDL__COUNT_OF(names) ? names[kind] : "?";
}

static bool ddl__kind_is_v(ddl_kind kind) { return ddl__kind_base(kind) != kind; }

/* Where the block of a rank lies in the larger tensor; of an all_to_all: the block that is sent to that rank. */
static ddl__span ddl__block(const ddl__plan_args *args, int32_t rank) {
    int64_t size = args->element_bytes;
    if (!ddl__kind_is_v(args->kind)) {
        return (ddl__span){rank * args->count * size, args->count * size};
    }
    return (ddl__span){args->offsets[rank] * size, args->counts[rank] * size};
}

/* Of an all_to_all: where the block that comes from a rank goes. */
static ddl__span ddl__recv_block(const ddl__plan_args *args, int32_t rank) {
    if (args->kind != DDL_ALL_TO_ALLV) {
        return ddl__block(args, rank);
    }
    int64_t size = args->element_bytes;
    return (ddl__span){args->recv_offsets[rank] * size, args->recv_counts[rank] * size};
}

/* Smallest r with 2^r >= n: the rounds in which n ranks can all hear of each other. */
static uint32_t ddl__log2_ceil(int32_t n) {
    uint32_t rounds = 0;
    while (((int64_t)1 << rounds) < n) {
        rounds++;
    }
    return rounds;
}

/* >>plan-build: the builder. An algorithm adds steps in an order that would be right on a machine that runs them one
 * by one; the builder finds which of them really depend on each other from the memory they touch, as a processor's
 * scoreboard does (Thornton, "Parallel operation in the Control Data 6600", 1964). So no algorithm states a data
 * dependency by hand, and none can be forgotten; ddl__plan_after is for order that memory does not show.
 * An error sticks: later calls do nothing and ddl__plan_finish returns it. */
#define DDL__NO_STEP UINT32_MAX

typedef struct ddl__edge {
    uint32_t before, after;
} ddl__edge;

/* Readers of a cell: a list that only grows at its head, so that two halves of a split cell can share the tail. */
typedef struct ddl__cell_reader {
    uint32_t step, next; /* next: index + 1, 0 ends */
} ddl__cell_reader;

/* A stretch of memory whose bytes have one history: who wrote it last, who has read it since. */
typedef struct ddl__cell {
    int64_t begin, end;
    uint32_t writer;  /* DDL__NO_STEP: nobody */
    uint32_t readers; /* index + 1 */
} ddl__cell;

/* The touched cells of one memory in order of address, without overlap; gaps have no history. */
typedef struct ddl__cells {
    ddl__cell *at;
    uint32_t count, cap;
} ddl__cells;

enum { DDL__USER_MEMORY = 0, DDL__TMP_MEMORY = 1 };

typedef struct ddl__planner {
    ddl__base *base;
    const ddl__plan_args *args;
    ddl_status status;
    ddl__step *steps;
    ddl__edge *edges;
    ddl__cell_reader *readers;
    uint32_t step_count, step_cap, edge_count, edge_cap, reader_count, reader_cap;
    ddl__cells cells[2];
    bool aliased;     /* IN and OUT are the same memory ... */
    int64_t shift[2]; /* ... in which IN and OUT begin here */
    int64_t tmp_bytes;
    uint32_t next_slot;
    uint32_t gate; /* the step that ends the fence; steps after it wait for it */
    bool fenced;
} ddl__planner;

/* Where "in place" puts the smaller tensor: at the rank's own part of the larger one. */
static void ddl__plan_alias(ddl__planner *p, const ddl__plan_args *args) {
    p->aliased = args->in_place || args->kind == DDL_BROADCAST;
    switch (ddl__kind_base(args->kind)) {
    case DDL_GATHER:
    case DDL_ALL_GATHER:
        p->shift[DDL__IN] = ddl__block(args, args->rank).at;
        break;
    case DDL_SCATTER:
    case DDL_REDUCE_SCATTER:
        p->shift[DDL__OUT] = ddl__block(args, args->rank).at;
        break;
    default:
        break;
    }
}

/* args must outlive the planner; the plan itself does not point into them. */
static void ddl__plan_open(ddl__planner *p, ddl__base *base, const ddl__plan_args *args) {
    *p = (ddl__planner){.base = base, .args = args, .gate = DDL__NO_STEP};
    ddl__plan_alias(p, args);
}

/* Frees what the plan has not taken over. */
static void ddl__plan_close(ddl__planner *p) {
    ddl__free(p->base, p->steps);
    ddl__free(p->base, p->edges);
    ddl__free(p->base, p->readers);
    ddl__free(p->base, p->cells[0].at);
    ddl__free(p->base, p->cells[1].at);
    p->steps = NULL;
    p->edges = NULL;
    p->readers = NULL;
    p->cells[0].at = p->cells[1].at = NULL;
}

/* Room for one more item: returns the array, moved if it had to grow; on failure the old one, and the error sticks. */
static void *ddl__plan_grow(ddl__planner *p, void *items, uint32_t count, uint32_t *cap, size_t item_bytes) {
    if (count < *cap) {
        return items;
    }
    uint32_t wanted = DDL__MAX(*cap * 2, 16u);
    void *larger = *cap > UINT32_MAX / 4 ? NULL : ddl__alloc_array(p->base, wanted, item_bytes);
    if (larger == NULL) {
        p->status = DDL_ERR_NOMEM;
        return items;
    }
    if (count > 0) {
        memcpy(larger, items, count * item_bytes);
    }
    ddl__free(p->base, items);
    *cap = wanted;
    return larger;
}

/* after does not start before `before` has ended. DDL__NO_STEP on either side means nothing. */
static void ddl__plan_after(ddl__planner *p, uint32_t after, uint32_t before) {
    if (before == DDL__NO_STEP || after == DDL__NO_STEP || before == after) {
        return;
    }
    for (uint32_t i = p->edge_count; i > 0 && p->edge_count - i < 8 && p->edges[i - 1].after == after; i--) {
        if (p->edges[i - 1].before == before) {
            return;
        }
    }
    p->edges = ddl__plan_grow(p, p->edges, p->edge_count, &p->edge_cap, sizeof *p->edges);
    if (p->status >= 0) {
        p->edges[p->edge_count++] = (ddl__edge){before, after};
    }
}

/* The first cell that ends after address. Algorithms walk upwards, so the last cell is tried first. */
static uint32_t ddl__cell_find(const ddl__cells *cells, int64_t address) {
    if (cells->count == 0 || cells->at[cells->count - 1].end <= address) {
        return cells->count;
    }
    uint32_t low = 0, high = cells->count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (cells->at[middle].end <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Cells are few where algorithms write whole chunks, and mostly come in order, so moving the rest is cheap. */
static void ddl__cell_insert(ddl__planner *p, ddl__cells *cells, uint32_t index, ddl__cell cell) {
    cells->at = ddl__plan_grow(p, cells->at, cells->count, &cells->cap, sizeof *cells->at);
    if (p->status < 0) {
        return;
    }
    memmove(&cells->at[index + 1], &cells->at[index], (cells->count - index) * sizeof *cells->at);
    cells->at[index] = cell;
    cells->count++;
}

/* Makes address a border between cells and returns the first cell at or above it. */
static uint32_t ddl__cell_split(ddl__planner *p, ddl__cells *cells, int64_t address) {
    uint32_t index = ddl__cell_find(cells, address);
    if (index == cells->count || cells->at[index].begin >= address) {
        return index;
    }
    ddl__cell lower = cells->at[index];
    lower.end = address;
    ddl__cell_insert(p, cells, index, lower);
    if (p->status >= 0) {
        cells->at[index + 1].begin = address;
    }
    return index + 1;
}

/* The newest reader becomes the head of the list. */
static void ddl__cell_add_reader(ddl__planner *p, ddl__cell *cell, uint32_t step) {
    p->readers = ddl__plan_grow(p, p->readers, p->reader_count, &p->reader_cap, sizeof *p->readers);
    if (p->status >= 0) {
        p->readers[p->reader_count++] = (ddl__cell_reader){step, cell->readers};
        cell->readers = p->reader_count;
    }
}

/* A reader waits for whoever wrote what it reads. */
static void ddl__cells_read(ddl__planner *p, ddl__cells *cells, int64_t begin, int64_t end, uint32_t step) {
    uint32_t i = ddl__cell_split(p, cells, begin);
    ddl__cell_split(p, cells, end);
    for (int64_t at = begin; at < end && p->status >= 0; at = cells->at[i++].end) {
        if (i == cells->count || cells->at[i].begin > at) {
            int64_t stop = i == cells->count ? end : DDL__MIN(end, cells->at[i].begin);
            ddl__cell_insert(p, cells, i, (ddl__cell){at, stop, DDL__NO_STEP, 0});
            if (p->status < 0) {
                return;
            }
        }
        ddl__plan_after(p, step, cells->at[i].writer);
        ddl__cell_add_reader(p, &cells->at[i], step);
    }
}

/* A writer waits for those who read the old bytes; they waited for the writer before, so it need not. */
static void ddl__cells_write(ddl__planner *p, ddl__cells *cells, int64_t begin, int64_t end, uint32_t step) {
    uint32_t first = ddl__cell_split(p, cells, begin), i = first;
    ddl__cell_split(p, cells, end);
    for (; p->status >= 0 && i < cells->count && cells->at[i].begin < end; i++) {
        uint32_t reader = cells->at[i].readers;
        if (reader == 0) {
            ddl__plan_after(p, step, cells->at[i].writer);
        }
        for (; reader != 0; reader = p->readers[reader - 1].next) {
            ddl__plan_after(p, step, p->readers[reader - 1].step);
        }
    }
    ddl__cell whole = {begin, end, step, 0};
    if (p->status < 0) {
        return;
    }
    if (i == first) {
        ddl__cell_insert(p, cells, first, whole);
        return;
    }
    cells->at[first] = whole;
    memmove(&cells->at[first + 1], &cells->at[i], (cells->count - i) * sizeof *cells->at);
    cells->count -= i - first - 1;
}

/* IN that is not also OUT is never written, so nobody ever waits for its readers. */
static void ddl__plan_touch(ddl__planner *p, uint32_t step, uint8_t space, int64_t offset, int64_t bytes, bool write) {
    if (bytes <= 0 || p->status < 0 || (space == DDL__IN && !p->aliased)) {
        return;
    }
    int64_t begin = offset + (space != DDL__TMP && p->aliased ? p->shift[space] : 0);
    ddl__cells *cells = &p->cells[space == DDL__TMP ? DDL__TMP_MEMORY : DDL__USER_MEMORY];
    if (write) {
        ddl__cells_write(p, cells, begin, begin + bytes, step);
    } else {
        ddl__cells_read(p, cells, begin, begin + bytes, step);
    }
}

/* A step that reduces in place reads what it overwrites: writing orders it after all that reading would, and more. A
 * step that reads what it writes finds itself among the readers, which ddl__plan_after ignores. */
static uint32_t ddl__plan_add(ddl__planner *p, ddl__step step) {
    p->steps = p->status < 0 ? p->steps
                             : ddl__plan_grow(p, p->steps, p->step_count, &p->step_cap, sizeof *p->steps);
    if (p->status < 0) {
        return DDL__NO_STEP;
    }
    uint32_t index = p->step_count++;
    p->steps[index] = step;
    if (step.kind == DDL__NATIVE) {
        return index; /* see ddl__plan_native */
    }
    if (step.kind != DDL__RECV) {
        ddl__plan_touch(p, index, step.src_space, step.src, step.bytes, false);
    }
    if (step.kind != DDL__SEND) {
        ddl__plan_touch(p, index, step.dst_space, step.dst, step.bytes, true);
    }
    return index;
}

/* Maps spans to a space: span.at + base is the offset there. Scratch holds only the part that is worked on. */
typedef struct ddl__place {
    ddl__space space;
    int64_t base;
} ddl__place;

static const ddl__place ddl__in = {DDL__IN, 0}, ddl__out = {DDL__OUT, 0};

/* The memory must not change until the step ends; the builder lets nobody write it before. */
static uint32_t ddl__plan_send(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__span span) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__SEND,
                                        .peer = peer,
                                        .slot = slot,
                                        .src_space = (uint8_t)src.space,
                                        .src = span.at + src.base,
                                        .bytes = span.bytes});
}

/* The send of peer has the same slot and size. */
static uint32_t ddl__plan_recv(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place dst, ddl__span span) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__RECV,
                                        .peer = peer,
                                        .slot = slot,
                                        .dst_space = (uint8_t)dst.space,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* dst = src op what peer sent; flags DDL__THEIRS_FIRST turns the operands. */
static uint32_t ddl__plan_recv_reduce(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__place dst,
                                      ddl__span span, uint8_t flags) {
    return ddl__plan_add(p, (ddl__step){.kind = DDL__RECV_REDUCE,
                                        .flags = flags,
                                        .peer = peer,
                                        .slot = slot,
                                        .src_space = (uint8_t)src.space,
                                        .dst_space = (uint8_t)dst.space,
                                        .src = span.at + src.base,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* Steps without a message. */
static uint32_t ddl__plan_local(ddl__planner *p, ddl__step_kind kind, ddl__place src, ddl__place dst, ddl__span span,
                                uint8_t flags) {
    return ddl__plan_add(p, (ddl__step){.kind = (uint8_t)kind,
                                        .flags = flags,
                                        .peer = -1,
                                        .src_space = (uint8_t)src.space,
                                        .dst_space = (uint8_t)dst.space,
                                        .src = span.at + src.base,
                                        .dst = span.at + dst.base,
                                        .bytes = span.bytes});
}

/* A collective of the ranks of this host, by a transport. bytes are those of the smaller tensor, as in ddl_native_call;
 * it reads all of `from` and writes all of `to`. */
static uint32_t ddl__plan_native(ddl__planner *p, ddl_kind kind, int32_t root, ddl__place src, ddl__span from,
                                 ddl__place dst, ddl__span to) {
    uint32_t step = ddl__plan_add(p, (ddl__step){.kind = DDL__NATIVE,
                                                 .peer = root,
                                                 .slot = (uint32_t)kind,
                                                 .src_space = (uint8_t)src.space,
                                                 .dst_space = (uint8_t)dst.space,
                                                 .src = from.at + src.base,
                                                 .dst = to.at + dst.base,
                                                 .bytes = DDL__MIN(from.bytes, to.bytes)});
    if (step != DDL__NO_STEP) {
        ddl__plan_touch(p, step, (uint8_t)src.space, from.at + src.base, from.bytes, false);
        ddl__plan_touch(p, step, (uint8_t)dst.space, to.at + dst.base, to.bytes, true);
    }
    return step;
}

/* Source and target may overlap, as with memmove. */
static uint32_t ddl__plan_copy(ddl__planner *p, ddl__place src, ddl__place dst, ddl__span span) {
    return ddl__plan_local(p, DDL__COPY, src, dst, span, 0);
}

/* dst = src op dst; flags DDL__DST_FIRST turns the operands. */
static uint32_t ddl__plan_reduce(ddl__planner *p, ddl__place src, ddl__place dst, ddl__span span, uint8_t flags) {
    return ddl__plan_local(p, DDL__REDUCE, src, dst, span, flags);
}

/* Scratch for a span, aligned for any vector. */
static ddl__place ddl__plan_tmp(ddl__planner *p, ddl__span span) {
    int64_t at = p->tmp_bytes;
    p->tmp_bytes += (span.bytes + 63) / 64 * 64;
    return (ddl__place){DDL__TMP, at - span.at};
}

/* count slots that no other phase of the plan uses. Every rank takes the same slots in the same order, also for
 * phases that it has no part in. */
static uint32_t ddl__plan_slots(ddl__planner *p, uint32_t count) {
    uint32_t first = p->next_slot;
    p->next_slot += count;
    return first;
}

/* What is sent before this rank knows that the receiver has called: see DDL__EAGER_BYTES. */
static void ddl__plan_at_once(ddl__planner *p, uint32_t send) {
    if (send != DDL__NO_STEP) {
        p->steps[send].flags = DDL__AT_ONCE;
    }
}

/* A step that does nothing and ends after all receives up to now: then this rank has heard of everybody it hears of. */
static uint32_t ddl__plan_join(ddl__planner *p) {
    uint32_t end = p->step_count;
    uint32_t join = ddl__plan_copy(p, ddl__in, ddl__out, (ddl__span){0, 0});
    for (uint32_t i = 0; i < end && p->status >= 0; i++) {
        if (p->steps[i].kind == DDL__RECV || p->steps[i].kind == DDL__RECV_REDUCE) {
            ddl__plan_after(p, join, i);
        }
    }
    return join;
}

/* Signals in ceil(log2 n) rounds, after which each rank knows that every rank has begun the operation: the
 * dissemination barrier of Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. Round k
 * hears from rank + 2^k. Each round waits for the one before, which is what makes the knowledge add up. */
static void ddl__plan_fence(ddl__planner *p) {
    int32_t size = p->args->size, rank = p->args->rank;
    uint32_t rounds = ddl__log2_ceil(size), slot = ddl__plan_slots(p, rounds);
    uint32_t heard = DDL__NO_STEP;
    for (uint32_t k = 0; k < rounds; k++) {
        int32_t distance = (int32_t)(1u << k);
        ddl__span signal = {0, 0};
        ddl__plan_after(p, ddl__plan_send(p, (rank - distance + size) % size, slot + k, ddl__in, signal), heard);
        uint32_t recv = ddl__plan_recv(p, (rank + distance) % size, slot + k, ddl__out, signal);
        ddl__plan_after(p, recv, heard);
        heard = recv;
    }
    p->gate = heard;
    p->fenced = true;
}

/* The fence of what comes from one root: signals up a binomial tree, n - 1 in all. When the root has heard of everybody
 * it begins; its data brings the others word of everybody. */
static void ddl__plan_fence_up(ddl__planner *p) {
    int32_t size = p->args->size, root = p->args->root, v = (p->args->rank - root + size) % size, parent = v & (v - 1);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span signal = {0, 0};
    for (int64_t bit = 1; bit < size - v && (v & bit) == 0; bit *= 2) {
        ddl__plan_recv(p, (int32_t)((v + bit + root) % size), slot, ddl__out, signal);
    }
    uint32_t heard = p->step_count > 0 ? ddl__plan_join(p) : DDL__NO_STEP;
    if (v > 0) {
        ddl__plan_after(p, ddl__plan_send(p, (parent + root) % size, slot, ddl__in, signal), heard);
    } else {
        p->gate = heard;
    }
    p->fenced = true;
}

/* Steps that wait for nothing wait for the fence; then waits are counted. */
static void ddl__plan_count_waits(ddl__planner *p) {
    for (uint32_t i = 0; i < p->edge_count; i++) {
        p->steps[p->edges[i].after].waits++;
    }
    for (uint32_t i = p->gate == DDL__NO_STEP ? p->step_count : p->gate + 1; i < p->step_count; i++) {
        if (p->steps[i].waits == 0 && p->steps[i].flags != DDL__AT_ONCE) {
            ddl__plan_after(p, i, p->gate);
            p->steps[i].waits = 1;
        }
    }
}

/* Turns the edges into lists per step (compressed sparse rows) and hands the plan over; the planner is closed either
 * way. Errors: DDL_ERR_NOMEM. Free with ddl__plan_free. */
static ddl_status ddl__plan_finish(ddl__planner *p, ddl__plan *out) {
    *out = (ddl__plan){0};
    if (p->status >= 0) {
        ddl__plan_count_waits(p);
    }
    uint32_t *nexts = p->status < 0 ? NULL : ddl__alloc_array(p->base, DDL__MAX(p->edge_count, 1u), sizeof *nexts);
    if (nexts == NULL) {
        ddl__plan_close(p);
        return DDL_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < p->edge_count; i++) {
        p->steps[p->edges[i].before].next_count++;
    }
    for (uint32_t i = 0, first = 0; i < p->step_count; i++) {
        p->steps[i].first_next = first;
        first += p->steps[i].next_count;
        p->steps[i].next_count = 0;
    }
    for (uint32_t i = 0; i < p->edge_count; i++) {
        ddl__step *before = &p->steps[p->edges[i].before];
        nexts[before->first_next + before->next_count++] = p->edges[i].after;
    }
    *out = (ddl__plan){.steps = p->steps,
                       .nexts = nexts,
                       .step_count = p->step_count,
                       .next_count = p->edge_count,
                       .tmp_bytes = p->tmp_bytes,
                       .fenced = p->fenced};
    p->steps = NULL;
    ddl__plan_close(p);
    return DDL_OK;
}

static void ddl__plan_free(ddl__base *base, ddl__plan *plan) {
    ddl__free(base, plan->steps);
    ddl__free(base, plan->nexts);
    *plan = (ddl__plan){0};
}

/* >>algo/cost */
/* algo/cost: what the closed forms of the algorithms are made of. It must not know how a link is measured. */

/* Measured or assumed, the same on every rank. Index 0 is inside a host, 1 between hosts. */
typedef struct ddl__cost_model {
    double latency_s[2], s_per_byte[2]; /* the alpha and beta of Hockney's model */
    double reduce_s_per_byte;           /* gamma */
    double message_s;                   /* what one more message costs the rank that sends it */
    int32_t oversubscription;           /* ranks per core; 0 and 1 are the same */
} ddl__cost_model;

/* A call as its cost sees it. */
typedef struct ddl__terms {
    double n, rounds;             /* ranks, ceil(log2 n) */
    double bytes;                 /* of the whole vector; of gather and its like: all blocks together */
    double latency, byte, reduce; /* of the slowest link in use */
    double near_latency, near_byte;
    double message; /* of a message that does not wait for the one before */
    double hosts, per_host;
    double crossing; /* how much slower a byte is when all ranks of a host send to others at once */
    double chunk;
    double turns; /* ranks per core */
    double native;
} ddl__terms;

static int32_t ddl__host_count(const ddl__plan_args *args) {
    int32_t last = 0;
    for (int32_t r = 0; args->host_of != NULL && r < args->size; r++) {
        last = DDL__MAX(last, args->host_of[r]);
    }
    return last + 1;
}

/* Bytes of all blocks, or of the vector that every rank has. The lengths in an all_to_allv are each rank's own, so
 * none may count. */
static int64_t ddl__total_bytes(const ddl__plan_args *args) {
    int64_t count = args->count;
    switch (ddl__kind_base(args->kind)) {
    case DDL_GATHER:
    case DDL_SCATTER:
    case DDL_ALL_GATHER:
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_TO_ALL:
        count *= args->size;
        break;
    default:
        break;
    }
    if (ddl__kind_is_v(args->kind)) {
        count = 0;
        for (int32_t r = 0; args->kind != DDL_ALL_TO_ALLV && r < args->size; r++) {
            count += args->counts[r];
        }
    }
    return count * args->element_bytes;
}

/* The largest block. */
static int64_t ddl__block_bytes(const ddl__plan_args *args) {
    int64_t count = args->count;
    if (ddl__kind_is_v(args->kind)) {
        count = 0;
        for (int32_t r = 0; args->kind != DDL_ALL_TO_ALLV && r < args->size; r++) {
            count = DDL__MAX(count, args->counts[r]);
        }
    }
    return count * args->element_bytes;
}

/* More ranks than cores: they take turns, so every time is as much longer. */
static void ddl__terms_of(ddl__terms *t, const ddl__plan_args *args, const ddl__cost_model *model) {
    int32_t hosts = ddl__host_count(args), far = hosts > 1;
    double turns = DDL__MAX(model->oversubscription, 1);
    *t = (ddl__terms){.n = args->size, .rounds = ddl__log2_ceil(args->size), .hosts = hosts};
    t->bytes = (double)ddl__total_bytes(args);
    t->per_host = DDL__MAX(t->n / t->hosts, 1.0);
    t->latency = (model->latency_s[far] + model->message_s) * turns;
    t->byte = model->s_per_byte[far] * (far ? 1 : turns);
    t->near_latency = (model->latency_s[0] + model->message_s) * turns;
    t->near_byte = model->s_per_byte[0] * turns;
    /* Ranks that share a core change places for most messages; one that sends many keeps the others waiting. */
    t->message = model->message_s * turns * turns;
    t->reduce = model->reduce_s_per_byte * turns;
    t->crossing = far ? t->per_host : 1;
    t->chunk = (double)args->chunk_bytes;
    t->turns = turns;
    t->native = args->native_s;
}

/* What an algorithm can do, and what it needs. */
enum {
    DDL__SERVES_V = 1,   /* the v-form of its kind too */
    DDL__KEEPS_ORDER = 2, /* x0 op x1 op ...: the op need not be commutative */
    /* And brackets from the left: the bits depend on the operands alone, not on group, transport or cuts. */
    DDL__RANK_ORDER = 4 | DDL__KEEPS_ORDER,
    DDL__FENCES = 8 /* needs a fence whatever the size */
};

/* An algorithm: a pure function from arguments to plan, with what choosing needs to know of it. */
typedef struct ddl__algo {
    const char *name;
    ddl_kind kind;
    uint32_t traits;
    bool (*can)(const ddl__plan_args *args); /* NULL: whenever the above fits */
    void (*plan)(ddl__planner *p, const ddl__plan_args *args);
    double (*cost)(const ddl__terms *t);               /* seconds, without a fence */
    int64_t (*peer_bytes)(const ddl__plan_args *args); /* a bound of what any rank sends to any one other */
} ddl__algo;

static bool ddl__algo_has(const ddl__algo *algo, uint32_t traits) { return (algo->traits & traits) == traits; }

/* Bounds that several algorithms share. */
static int64_t ddl__peer_nothing(const ddl__plan_args *args) {
    (void)args;
    return 0;
}

static int64_t ddl__peer_once(const ddl__plan_args *args) { return ddl__total_bytes(args); }

static int64_t ddl__peer_twice(const ddl__plan_args *args) { return 2 * ddl__total_bytes(args); }

/* One block, or all that an all_to_allv may send: nobody knows, so it counts as too much. */
static int64_t ddl__peer_block(const ddl__plan_args *args) {
    return args->kind == DDL_ALL_TO_ALLV ? INT64_MAX : ddl__block_bytes(args);
}

/* >>algo/tree */
/* algo/tree: what runs along trees: barrier, broadcast, reduce, and all_reduce as one after the other.
 * Trees differ only in who is whose child; data moves the same way in all of them. */

/* A span as messages of one chunk each, in slots from `slot` on, so that what comes after can begin with the first
 * chunk. Nothing for an empty span: where these are used, both ends know that it is empty. */
static void ddl__send_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__span span) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_send(p, peer, slot + c, src, ddl__chunk(p->args, span, c));
    }
}

static void ddl__recv_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place dst, ddl__span span) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_recv(p, peer, slot + c, dst, ddl__chunk(p->args, span, c));
    }
}

static void ddl__recv_reduce_chunks(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place src, ddl__place dst,
                                    ddl__span span, uint8_t flags) {
    for (uint32_t c = 0; span.bytes > 0 && c < ddl__chunk_count(p->args, span.bytes); c++) {
        ddl__plan_recv_reduce(p, peer, slot + c, src, dst, ddl__chunk(p->args, span, c), flags);
    }
}

#define DDL__MAX_CHILDREN 32

/* One rank's place in a tree. Children stand in the order in which they are reduced. */
typedef struct ddl__tree {
    int32_t parent; /* -1 at the root */
    int32_t child_count;
    int32_t child[DDL__MAX_CHILDREN];
} ddl__tree;

/* Binomial: ranks count from the root; the parent of v is v without its lowest set bit, its children are v plus each
 * smaller power of two. The subtree of v is v .. v + lowbit - 1, so ascending children keep the order of ranks. */
static ddl__tree ddl__tree_binomial(int32_t size, int32_t rank, int32_t root) {
    int32_t v = (rank - root + size) % size, lowest = v & -v;
    ddl__tree tree = {.parent = v == 0 ? -1 : (v - lowest + root) % size};
    for (int32_t bit = 1; (v == 0 || bit < lowest) && bit < size - v; bit *= 2) {
        tree.child[tree.child_count++] = (v + bit + root) % size;
        if (bit > INT32_MAX / 2) {
            break;
        }
    }
    return tree;
}

/* A line that begins at the root: everybody passes on to the next rank, so each link carries the data once. */
static ddl__tree ddl__tree_chain(int32_t size, int32_t rank, int32_t root) {
    int32_t v = (rank - root + size) % size;
    ddl__tree tree = {.parent = v == 0 ? -1 : (rank - 1 + size) % size};
    if (v + 1 < size) {
        tree.child[tree.child_count++] = (rank + 1) % size;
    }
    return tree;
}

/* The in-order tree of NCCL (src/graph/trees.cc) over 0 .. size-1: odd numbers are leaves, 0 is the root and has one
 * child, the highest power of two below size. Fills in numbers, not ranks. */
static ddl__tree ddl__tree_inorder(int32_t size, int32_t v) {
    int32_t bit = 1;
    while (v == 0 ? bit < size : (v & bit) == 0) {
        bit *= 2;
    }
    ddl__tree tree = {.parent = -1};
    if (v > 0) {
        int32_t up = (v ^ bit) | (bit * 2);
        tree.parent = up < size ? up : v ^ bit;
    }
    int32_t low = bit / 2;
    if (v > 0 && low > 0) {
        tree.child[tree.child_count++] = v - low;
    }
    while (low > 0 && v + low >= size) {
        low /= 2;
    }
    if (low > 0) {
        tree.child[tree.child_count++] = v + low;
    }
    return tree;
}

/* The second tree gives the numbers 1 .. size-1 to other ranks, so that a leaf of one tree is inner in the other: it
 * mirrors them when size is odd, else shifts them by one. Its own inverse is `back`. */
static int32_t ddl__tree_second(int32_t size, int32_t v, bool back) {
    if (v <= 0) {
        return v;
    }
    if (size % 2 == 1) {
        return size - v;
    }
    return back ? (v + size - 3) % (size - 1) + 1 : v % (size - 1) + 1;
}

/* One of the two trees of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
 * scan", Parallel Computing 35, 2009. Both have the same root, as theirs; every other rank has children in at most
 * one tree, so with half of the data in each, nobody sends or receives more than the root does. */
static ddl__tree ddl__tree_double(int32_t size, int32_t rank, int32_t root, bool second) {
    int32_t v = (rank - root + size) % size;
    ddl__tree tree = ddl__tree_inorder(size, second ? ddl__tree_second(size, v, false) : v);
    for (int32_t i = -1; i < tree.child_count; i++) {
        int32_t *at = i < 0 ? &tree.parent : &tree.child[i];
        if (*at >= 0) {
            *at = ((second ? ddl__tree_second(size, *at, true) : *at) + root) % size;
        }
    }
    return tree;
}

/* Sends one chunk from the root (where it is in `source`) to OUT of all others; the largest subtree first. */
static void ddl__tree_down(ddl__planner *p, const ddl__tree *tree, uint32_t slot, ddl__place source, ddl__span chunk) {
    if (tree->parent >= 0) {
        ddl__plan_recv(p, tree->parent, slot, ddl__out, chunk);
        source = ddl__out;
    }
    for (int32_t i = tree->child_count - 1; i >= 0; i--) {
        ddl__plan_send(p, tree->child[i], slot, source, chunk);
    }
}

/* Reduces one chunk towards the root: own IN first, then the children in order. Partial results stand in `partial`;
 * the last one at the root goes to OUT, which the other children may not have touched before. */
static void ddl__tree_up(ddl__planner *p, const ddl__tree *tree, uint32_t slot, ddl__place partial, ddl__span chunk) {
    ddl__place from = ddl__in;
    for (int32_t i = 0; i < tree->child_count; i++) {
        bool last = tree->parent < 0 && i == tree->child_count - 1;
        ddl__place to = last ? ddl__out : partial;
        ddl__plan_recv_reduce(p, tree->child[i], slot, from, to, chunk, 0);
        from = to;
    }
    if (tree->parent >= 0) {
        ddl__plan_send(p, tree->parent, slot, from, chunk);
    }
}

/* Scratch for partial results: a few chunks that are used in turn. */
#define DDL__WINDOW 16
typedef struct ddl__window {
    ddl__place at[DDL__WINDOW];
} ddl__window;

/* No more of them than there are chunks. The builder makes a chunk wait until the one whose place it takes has left:
 * scratch stays small, however long the vector is, and the pipeline is at most this deep. */
static ddl__window ddl__plan_window(ddl__planner *p, uint32_t chunks, int64_t chunk_bytes) {
    ddl__window window = {0};
    for (uint32_t i = 0; i < DDL__MIN(chunks, (uint32_t)DDL__WINDOW); i++) {
        window.at[i] = ddl__plan_tmp(p, (ddl__span){0, chunk_bytes});
    }
    return window;
}

static ddl__place ddl__window_place(const ddl__window *window, uint32_t index, ddl__span chunk) {
    ddl__place place = window->at[index % DDL__WINDOW];
    place.base -= chunk.at;
    return place;
}

/* slots: one for each chunk */
static void ddl__plan_tree_broadcast(ddl__planner *p, const ddl__plan_args *args, const ddl__tree *tree,
                                     ddl__span span) {
    uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, chunks);
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__tree_down(p, tree, slot + c, ddl__in, ddl__chunk(args, span, c));
    }
}

/* The same upwards. Leaves send straight from IN and need no scratch. */
static void ddl__plan_tree_reduce(ddl__planner *p, const ddl__plan_args *args, const ddl__tree *tree, ddl__span span) {
    uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window window = {0};
    if (tree->child_count > 0) {
        window = ddl__plan_window(p, chunks, DDL__MIN(span.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, span, c);
        ddl__tree_up(p, tree, slot + c, ddl__window_place(&window, c, chunk), chunk);
    }
}

static ddl__span ddl__whole(const ddl__plan_args *args) { return (ddl__span){0, args->count * args->element_bytes}; }

/* The part of the vector that goes through one of the two trees; the second may be empty, and is then a signal. */
static ddl__span ddl__tree_half(const ddl__plan_args *args, int32_t half) {
    return ddl__span_part(ddl__whole(args), 2, half, args->element_bytes);
}

/* barrier */

/* Nothing after the fence. */
static void ddl__algo_barrier(ddl__planner *p, const ddl__plan_args *args) {
    (void)p;
    (void)args;
}

/* Costs below are those of the sources, in Hockney's terms: alpha is t->latency, beta t->byte, gamma t->reduce; M is
 * t->bytes. ceil(log2 n) alpha. */
static double ddl__cost_barrier(const ddl__terms *t) { return t->rounds * t->latency; }

/* Signals up a binomial tree and down again: twice the rounds, but 2 (n - 1) messages in all instead of n ceil(log2 n),
 * which is what counts where many ranks share a core. */
static void ddl__algo_barrier_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, 0);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span signal = {0, 0};
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__plan_recv(p, tree.child[i], slot, ddl__out, signal);
    }
    uint32_t heard = tree.child_count > 0 ? ddl__plan_join(p) : DDL__NO_STEP;
    if (tree.parent >= 0) {
        ddl__plan_after(p, ddl__plan_send(p, tree.parent, slot, ddl__in, signal), heard);
        heard = ddl__plan_recv(p, tree.parent, slot, ddl__out, signal);
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__plan_after(p, ddl__plan_send(p, tree.child[i], slot, ddl__in, signal), heard);
    }
}

static double ddl__cost_barrier_tree(const ddl__terms *t) { return 2 * t->rounds * t->latency / t->turns; }

/* broadcast */

/* What the root of two ranks sends while the other one's signal is on its way. Its first message is word of everybody,
 * so the other may write at once. Returns what remains. */
static ddl__span ddl__broadcast_head(ddl__planner *p, const ddl__tree *tree, ddl__span whole) {
    ddl__span head = {0, DDL__MIN(whole.bytes, DDL__EAGER_BYTES)};
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree->parent >= 0) {
        ddl__plan_recv(p, tree->parent, slot, ddl__out, head);
    } else {
        ddl__plan_at_once(p, ddl__plan_send(p, tree->child[0], slot, ddl__in, head));
    }
    return (ddl__span){head.bytes, whole.bytes - head.bytes};
}

/* Whole or in chunks: a rank gives its first child the second chunk while that child passes on the first. */
static void ddl__algo_broadcast_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span rest = ddl__whole(args);
    if (p->fenced && args->size == 2) {
        rest = ddl__broadcast_head(p, &tree, rest);
    }
    if (rest.at == 0 || rest.bytes > 0) {
        ddl__plan_tree_broadcast(p, args, &tree, rest);
    }
}

static double ddl__cost_chunks(const ddl__terms *t, double bytes) {
    double chunks = bytes / t->chunk;
    return chunks < 1 ? 1 : chunks;
}

/* ceil(log2 n) (alpha + M beta): the root sends everything to each of its children. */
static double ddl__cost_broadcast_tree(const ddl__terms *t) { return t->rounds * (t->latency + t->bytes * t->byte); }

/* Pipelined along a line of ranks: the best for large data, the worst for small. */
static void ddl__algo_broadcast_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_chain(args->size, args->rank, args->root);
    ddl__plan_tree_broadcast(p, args, &tree, ddl__whole(args));
}

/* k chunks: the last one has to wait for k - 1 others at the root, then passes n - 1 links. */
static double ddl__cost_broadcast_chain(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes);
    return (t->n - 2 + chunks) * (t->latency + t->bytes / chunks * t->byte);
}

/* Two parents may write OUT, so it always begins with a fence. */
static void ddl__algo_broadcast_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, args->root, half == 1);
        ddl__plan_tree_broadcast(p, args, &tree, ddl__tree_half(args, half));
    }
}

/* Each round of the pipeline moves a chunk in each tree. */
static double ddl__cost_broadcast_double_tree(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes / 2);
    return (t->rounds + chunks) * 2 * (t->latency + t->bytes / 2 / chunks * t->byte * t->crossing);
}

/* reduce. An op that is not commutative is reduced to rank 0, whose tree keeps the order, and sent on from there. */

static void ddl__algo_reduce_tree(ddl__planner *p, const ddl__plan_args *args) {
    if (args->commutative || args->root == 0) {
        ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
        ddl__plan_tree_reduce(p, args, &tree, ddl__whole(args));
        return;
    }
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, 0);
    if (args->rank == 0) {
        tree.parent = args->root;
    }
    ddl__span whole = ddl__whole(args);
    ddl__plan_tree_reduce(p, args, &tree, whole);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = p->next_slot - chunks;
    for (uint32_t c = 0; args->rank == args->root && c < chunks; c++) {
        ddl__plan_recv(p, 0, slot + c, ddl__out, ddl__chunk(args, whole, c));
    }
}

/* ceil(log2 n) (alpha + M (beta + gamma)) */
static double ddl__cost_reduce_tree(const ddl__terms *t) {
    return t->rounds * (t->latency + t->bytes * (t->byte + t->reduce));
}

/* From the far end of the line towards the root. Operands come in the order x_root, x_root+1, ... around, so the op
 * must commute. */
static void ddl__algo_reduce_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_chain(args->size, args->rank, args->root);
    ddl__plan_tree_reduce(p, args, &tree, ddl__whole(args));
}

static double ddl__cost_reduce_chain(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes);
    return (t->n - 2 + chunks) * (t->latency + t->bytes / chunks * (t->byte + t->reduce));
}

/* Reductions from two sides into one OUT: the fence comes first. The second tree does not keep the order of ranks. */
static void ddl__algo_reduce_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, args->root, half == 1);
        ddl__plan_tree_reduce(p, args, &tree, ddl__tree_half(args, half));
    }
}

static double ddl__cost_reduce_double_tree(const ddl__terms *t) {
    double chunks = ddl__cost_chunks(t, t->bytes / 2);
    return (t->rounds + chunks) * 2 *
           (t->latency + t->bytes / 2 / chunks * (t->byte * t->crossing + t->reduce));
}

/* all_reduce: up and down both trees, chunk by chunk. */
static void ddl__algo_all_reduce_double_tree(ddl__planner *p, const ddl__plan_args *args) {
    for (int32_t half = 0; half < 2; half++) {
        ddl__tree tree = ddl__tree_double(args->size, args->rank, 0, half == 1);
        ddl__span span = ddl__tree_half(args, half);
        uint32_t chunks = ddl__chunk_count(args, span.bytes), slot = ddl__plan_slots(p, 2 * chunks);
        for (uint32_t c = 0; c < chunks; c++) {
            ddl__span chunk = ddl__chunk(args, span, c);
            ddl__tree_up(p, &tree, slot + 2 * c, ddl__out, chunk);
            ddl__tree_down(p, &tree, slot + 2 * c + 1, ddl__out, chunk);
        }
    }
}

/* Up and down overlap but for the first chunks: the way down adds its latency, and its bytes again. */
static double ddl__cost_all_reduce_double_tree(const ddl__terms *t) {
    return ddl__cost_reduce_double_tree(t) + t->rounds * t->latency + t->bytes * t->byte * t->crossing;
}

/* >>algo/ring */
/* algo/ring: what runs around rings: the bandwidth-optimal algorithms for large data. Ring reduce-scatter and
 * all-gather are building blocks of all_reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
 * clusters of workstations", JPDC 69, 2009), of broadcast and reduce of large vectors, and of the hierarchy. */

typedef struct ddl__ring {
    int32_t size, index, prev, next; /* index of this rank in the ring; prev and next are ranks */
} ddl__ring;

/* All ranks of the group, in order. Launchers number ranks by host, so only one link of the ring leaves each host. */
static ddl__ring ddl__ring_all(const ddl__plan_args *args) {
    return (ddl__ring){args->size, args->rank, (args->rank + args->size - 1) % args->size,
                       (args->rank + 1) % args->size};
}

/* How the data of a ring is cut: member i's part is the i-th equal part of a span, or the block of rank i. */
typedef struct ddl__cut {
    const ddl__plan_args *args;
    bool blocks;
    ddl__span whole;
    int32_t parts;
} ddl__cut;

static ddl__span ddl__cut_part(const ddl__cut *cut, int32_t index) {
    if (cut->blocks) {
        return ddl__block(cut->args, index);
    }
    return ddl__span_part(cut->whole, cut->parts, index, cut->args->element_bytes);
}

/* Chunks of the largest part: how many slots one round needs. */
static uint32_t ddl__cut_chunks(const ddl__cut *cut) {
    int64_t bytes = cut->blocks ? ddl__block_bytes(cut->args) : ddl__cut_part(cut, 0).bytes;
    return ddl__chunk_count(cut->args, bytes);
}

/* Where the members' own data is, where partial results go, and where the finished part goes. With turn_bytes > 0
 * there is scratch for two parts, which the rounds use in turn. */
typedef struct ddl__flow {
    ddl__place own, work, last;
    int64_t turn_bytes;
} ddl__flow;

/* A part is received in one round and leaves in the next, while the other half of the scratch takes the next part. */
static ddl__place ddl__flow_work(const ddl__flow *flow, int32_t round, ddl__span part) {
    if (flow->turn_bytes == 0) {
        return flow->work;
    }
    return (ddl__place){flow->work.space, flow->work.base + round % 2 * flow->turn_bytes - part.at};
}

/* Each part travels around the ring once and collects every member's contribution; part i ends at member i. In round s
 * member i sends part i - s - 1 and takes part i - s - 2; with three members:
 *     round 0:  0 sends part 2 to 1, 1 sends part 0 to 2, 2 sends part 1 to 0
 *     round 1:  0 sends part 1 to 1, 1 sends part 2 to 2, 2 sends part 0 to 0
 * Empty parts do not travel. Every chunk moves on as soon as it is reduced. One member reduces a part at a time, so all
 * ranks get the same bits. */
static void ddl__ring_reduce_scatter(ddl__planner *p, const ddl__ring *ring, const ddl__cut *cut, ddl__flow flow) {
    uint32_t each = ddl__cut_chunks(cut), slot = ddl__plan_slots(p, each * (uint32_t)ring->size);
    for (int32_t s = 0; s + 1 < ring->size; s++, slot += each) {
        ddl__span out = ddl__cut_part(cut, (ring->index - s - 1 + ring->size) % ring->size);
        ddl__span in = ddl__cut_part(cut, (ring->index - s - 2 + 2 * ring->size) % ring->size);
        ddl__place from = s == 0 ? flow.own : ddl__flow_work(&flow, s - 1, out);
        ddl__place to = s + 2 == ring->size ? flow.last : ddl__flow_work(&flow, s, in);
        ddl__send_chunks(p, ring->next, slot, from, out);
        ddl__recv_reduce_chunks(p, ring->prev, slot, flow.own, to, in, 0);
    }
}

/* Each part travels around the ring once, unchanged; all of them end in `to`. Round s: send part i - s, take part
 * i - s - 1. */
static void ddl__ring_all_gather(ddl__planner *p, const ddl__ring *ring, const ddl__cut *cut, ddl__place own,
                                 ddl__place to) {
    uint32_t each = ddl__cut_chunks(cut), slot = ddl__plan_slots(p, each * (uint32_t)ring->size);
    for (int32_t s = 0; s + 1 < ring->size; s++, slot += each) {
        ddl__span out = ddl__cut_part(cut, (ring->index - s + ring->size) % ring->size);
        ddl__span in = ddl__cut_part(cut, (ring->index - s - 1 + ring->size) % ring->size);
        ddl__send_chunks(p, ring->next, slot, s == 0 ? own : to, out);
        ddl__recv_chunks(p, ring->prev, slot, to, in);
    }
}

/* Reduce-scatter and all-gather of what stands in OUT, for rings of a hierarchy, which are fenced. */
static void ddl__ring_all_reduce(ddl__planner *p, const ddl__ring *ring, const ddl__cut *piece) {
    ddl__ring_reduce_scatter(p, ring, piece, (ddl__flow){ddl__out, ddl__out, ddl__out, 0});
    ddl__ring_all_gather(p, ring, piece, ddl__out, ddl__out);
}

/* all_reduce. Without a fence, partial results stay in scratch: only the last message of a part's round trip brings
 * word of every rank. */
static void ddl__algo_all_reduce_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__place work = p->fenced ? ddl__out : ddl__plan_tmp(p, cut.whole);
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, ddl__out, 0});
    ddl__ring_all_gather(p, &ring, &cut, ddl__out, ddl__out);
}

/* 2 (n-1) alpha + 2 (n-1)/n M beta + (n-1)/n M gamma: no algorithm sends fewer bytes. */
static double ddl__cost_all_reduce_ring(const ddl__terms *t) {
    return 2 * (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (2 * t->byte + t->reduce);
}

/* all_gather. Blocks of ranks that this one has not heard of yet go to OUT, hence always a fence. */
static void ddl__algo_all_gather_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, true, {0, 0}, args->size};
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    ddl__ring_all_gather(p, &ring, &cut, own, ddl__out);
    if (!args->in_place) {
        ddl__plan_copy(p, own, ddl__out, mine);
    }
}

/* (n-1) alpha + (n-1)/n M beta, M being all blocks together */
static double ddl__cost_gather_ring(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * t->byte;
}

/* reduce_scatter: OUT takes nothing but the last message of the own block's round trip, which tells of every rank. */
static void ddl__algo_reduce_scatter_ring(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ddl__cut cut = {args, true, {0, 0}, args->size};
    int64_t turn = ddl__block_bytes(args);
    ddl__place work = ddl__plan_tmp(p, (ddl__span){0, 2 * turn});
    ddl__place last = {DDL__OUT, -ddl__block(args, args->rank).at};
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, last, turn});
}

static double ddl__cost_reduce_scatter_ring(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte + t->reduce);
}

/* The root's vector in parts by distance from the root, along a binomial tree: each rank has or wants the parts of
 * its subtree. */
static ddl__span ddl__subtree(const ddl__plan_args *args, int32_t rank) {
    int32_t v = (rank - args->root + args->size) % args->size, lowest = v & -v;
    int32_t end = v == 0 || lowest > args->size - v ? args->size : v + lowest;
    return ddl__span_parts(ddl__whole(args), args->size, v, end, args->element_bytes);
}

/* Positions by distance from the root, as in the tree, so that parts need not move between the two halves. */
static ddl__ring ddl__ring_from_root(const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_all(args);
    ring.index = (args->rank - args->root + args->size) % args->size;
    return ring;
}

/* broadcast as scatter and all-gather: van de Geijn's algorithm for long vectors (Barnett et al., "Interprocessor
 * collective communication library", 1994). Two neighbours write OUT, hence the fence. */
static void ddl__algo_broadcast_scatter(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    uint32_t slot = ddl__plan_slots(p, ddl__chunk_count(args, ddl__whole(args).bytes));
    if (tree.parent >= 0) {
        ddl__recv_chunks(p, tree.parent, slot, ddl__out, ddl__subtree(args, args->rank));
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__send_chunks(p, tree.child[i], slot, ddl__out, ddl__subtree(args, tree.child[i]));
    }
    ddl__ring ring = ddl__ring_from_root(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__ring_all_gather(p, &ring, &cut, ddl__out, ddl__out);
}

/* (ceil(log2 n) + n - 1) alpha + 2 (n-1)/n M beta */
static double ddl__cost_broadcast_scatter(const ddl__terms *t) {
    return (t->rounds + t->n - 1) * t->latency + 2 * (t->n - 1) / t->n * t->bytes * t->byte;
}

/* reduce as reduce-scatter and gather: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004,
 * here with a ring for the first half. Only the root has an OUT; the others work in scratch. */
static void ddl__algo_reduce_scatter_gather(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring ring = ddl__ring_from_root(args);
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    ddl__place work = args->rank == args->root ? ddl__out : ddl__plan_tmp(p, cut.whole);
    ddl__ring_reduce_scatter(p, &ring, &cut, (ddl__flow){ddl__in, work, work, 0});
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    uint32_t slot = ddl__plan_slots(p, ddl__chunk_count(args, cut.whole.bytes));
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__recv_chunks(p, tree.child[i], slot, work, ddl__subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__send_chunks(p, tree.parent, slot, work, ddl__subtree(args, args->rank));
    }
}

static double ddl__cost_reduce_scatter_gather(const ddl__terms *t) {
    return ddl__cost_broadcast_scatter(t) + (t->n - 1) / t->n * t->bytes * t->reduce;
}

/* >>algo-hierarchy: all_reduce by host: reduce-scatter inside each host, all_reduce of each part between the ranks
 * that have it, all-gather inside (BlueConnect: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on
 * heterogeneous network hierarchy", SysML 2019, with two dimensions). Between hosts travels what a single ring over
 * all ranks would send there, in 2 (hosts - 1) rounds instead of 2 (n - 1). */

/* The ring of the ranks that agree with this one in one digit (host, or number within the host); index is the other
 * digit. */
static ddl__ring ddl__ring_of(const ddl__plan_args *args, bool inside) {
    int32_t mine = args->host_of[args->rank], number = 0;
    for (int32_t r = 0; r < args->rank; r++) {
        number += args->host_of[r] == mine;
    }
    ddl__ring ring = {.prev = -1, .next = -1};
    int32_t first = -1, last = -1;
    for (int32_t host = 0, hosts = ddl__host_count(args); host < hosts; host++) {
        for (int32_t r = 0, n = 0; r < args->size; r++) {
            if (args->host_of[r] != host || (inside ? host != mine : n++ != number)) {
                continue;
            }
            first = first < 0 ? r : first;
            if (r == args->rank) {
                ring.index = ring.size;
                ring.prev = last;
            }
            ring.next = last == args->rank ? r : ring.next;
            last = r;
            ring.size++;
        }
    }
    ring.prev = ring.prev < 0 ? last : ring.prev;
    ring.next = ring.next < 0 ? first : ring.next;
    return ring;
}

/* Several hosts with the same number of ranks each, at least two. */
static bool ddl__can_hierarchy(const ddl__plan_args *args) {
    int32_t hosts = ddl__host_count(args);
    if (hosts < 2 || args->size % hosts != 0 || args->size == hosts) {
        return false;
    }
    for (int32_t host = 0; host < hosts; host++) {
        int32_t members = 0;
        for (int32_t r = 0; r < args->size; r++) {
            members += args->host_of[r] == host;
        }
        if (members != args->size / hosts) {
            return false;
        }
    }
    return true;
}

static void ddl__algo_all_reduce_hierarchy(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    ddl__cut cut = {args, false, ddl__whole(args), inside.size};
    ddl__cut piece = {args, false, ddl__cut_part(&cut, inside.index), across.size};
    /* All pieces take as many slots as the largest, so that every rank counts alike. */
    ddl__cut largest = {args, false, ddl__cut_part(&cut, 0), across.size};
    ddl__ring_reduce_scatter(p, &inside, &cut, (ddl__flow){ddl__in, ddl__out, ddl__out, 0});
    uint32_t slot = p->next_slot;
    ddl__ring_all_reduce(p, &across, &piece);
    p->next_slot = slot + 2 * ddl__cut_chunks(&largest) * (uint32_t)across.size;
    ddl__ring_all_gather(p, &inside, &cut, ddl__out, ddl__out);
}

/* BlueConnect's sum over both levels. All ranks of a host use its link at once, each for M / per_host bytes, so the
 * link carries M in all. */
static double ddl__cost_all_reduce_hierarchy(const ddl__terms *t) {
    double l = t->per_host, h = t->hosts;
    double inside = 2 * (l - 1) * t->near_latency + (l - 1) / l * t->bytes * (2 * t->near_byte + t->reduce);
    return inside + 2 * (h - 1) * t->latency + (h - 1) / h * t->bytes * (2 * t->byte + t->reduce / l);
}

/* >>algo/doubling */
/* algo/doubling: recursive doubling and halving: log2 n rounds between partners whose numbers differ in one bit
 * (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005). */

/* Any number of ranks on a power of two: of the first 2 * extra ranks each even one gives its data to the odd one
 * above it and waits for the result. Neighbours in rank are folded, so the order of operands stays. */
typedef struct ddl__fold {
    int32_t pow2, extra, rounds;
    int32_t id;  /* 0 .. pow2-1, -1 for those who wait */
    bool folded; /* this rank carries the one below it */
} ddl__fold;

static ddl__fold ddl__fold_of(int32_t size, int32_t rank) {
    ddl__fold fold = {.pow2 = 1};
    while (fold.pow2 <= size / 2) {
        fold.pow2 *= 2;
        fold.rounds++;
    }
    fold.extra = size - fold.pow2;
    fold.folded = rank < 2 * fold.extra && rank % 2 == 1;
    fold.id = rank >= 2 * fold.extra ? rank - fold.extra : fold.folded ? rank / 2 : -1;
    return fold;
}

/* Which rank plays an id; ids rise with ranks. */
static int32_t ddl__fold_rank(const ddl__fold *fold, int32_t id) {
    return id < fold->extra ? 2 * id + 1 : id + fold->extra;
}

/* Both partners compute lower op higher. */
static uint8_t ddl__theirs_first(bool they_are_lower) { return they_are_lower ? DDL__THEIRS_FIRST : 0; }

/* OUT = IN op theirs where both are the same memory and the message still has to leave it. A small message leaves at
 * once; a large one may stay until the partner looks at it, and the partner does the same: so receive beside. */
static void ddl__exchange_in_place(ddl__planner *p, int32_t peer, uint32_t slot, ddl__place beside, ddl__span chunk) {
    ddl__plan_send(p, peer, slot, ddl__in, chunk);
    if (!p->fenced) {
        ddl__plan_recv_reduce(p, peer, slot, ddl__in, ddl__out, chunk, ddl__theirs_first(peer < p->args->rank));
        return;
    }
    ddl__plan_recv(p, peer, slot, beside, chunk);
    ddl__plan_reduce(p, beside, ddl__out, chunk, peer < p->args->rank ? 0 : DDL__DST_FIRST);
}

/* all_reduce of one chunk; slots: one to fold, one for each round, one to unfold. Both partners compute lower op
 * higher, so they get the same bits. The result of a round goes beside its operand, which may still be leaving. */
static void ddl__double_chunk(ddl__planner *p, const ddl__fold *fold, uint32_t slot, const ddl__place *beside,
                              ddl__span chunk) {
    int32_t rank = p->args->rank;
    ddl__place at = ddl__in;
    if (fold->id < 0) {
        ddl__plan_send(p, rank + 1, slot, ddl__in, chunk);
        ddl__plan_recv(p, rank + 1, slot + (uint32_t)fold->rounds + 1, ddl__out, chunk);
        return;
    }
    if (fold->folded) {
        ddl__plan_recv_reduce(p, rank - 1, slot, ddl__in, beside[1], chunk, DDL__THEIRS_FIRST);
        at = beside[1];
    }
    for (int32_t k = 0; k < fold->rounds; k++) {
        int32_t peer = ddl__fold_rank(fold, fold->id ^ (1 << k));
        uint32_t round = slot + 1 + (uint32_t)k;
        ddl__place to = k == fold->rounds - 1 ? ddl__out : beside[k % 2];
        if (at.space == DDL__IN && to.space == DDL__OUT && p->args->in_place) {
            ddl__exchange_in_place(p, peer, round, beside[0], chunk);
        } else {
            ddl__plan_send(p, peer, round, at, chunk);
            ddl__plan_recv_reduce(p, peer, round, at, to, chunk, ddl__theirs_first(peer < rank));
        }
        at = to;
    }
    if (fold->folded) {
        ddl__plan_send(p, rank - 1, slot + (uint32_t)fold->rounds + 1, ddl__out, chunk);
    }
}

/* Chunks are independent of each other: each has its own slots and, in turn, its own pair of places. */
static void ddl__algo_all_reduce_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), each = (uint32_t)fold.rounds + 2;
    uint32_t slot = ddl__plan_slots(p, chunks * each);
    ddl__window window = {0};
    if (fold.id >= 0 && (args->size > 2 || p->fenced)) {
        window = ddl__plan_window(p, 2 * chunks, DDL__MIN(whole.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        ddl__place beside[2] = {ddl__window_place(&window, 2 * c, chunk), ddl__window_place(&window, 2 * c + 1, chunk)};
        ddl__double_chunk(p, &fold, slot + c * each, beside, chunk);
    }
}

static bool ddl__is_pow2(double n) { return ((int64_t)n & ((int64_t)n - 1)) == 0; }

/* ceil(log2 n) (alpha + M (beta + gamma)), and one round more when some rank that folded may have to wait for another
 * that did: ids must differ in all bits for that, so more than half of them are folded. The ranks of a host share its
 * link. */
static double ddl__cost_all_reduce_doubling(const ddl__terms *t) {
    double whole = (double)((int64_t)1 << (int)t->rounds);
    double rounds = t->rounds + (t->n < whole && t->n > 0.75 * whole ? 1 : 0);
    return rounds * (t->latency + t->bytes * (t->byte * t->crossing + t->reduce));
}

/* all_reduce by halving and doubling: reduce-scatter in which the partners split what they have, then the same way
 * back. Partners are near first, so that data is always of a run of ranks and the order of operands stays. */
typedef struct ddl__halving {
    ddl__fold fold;
    ddl__span whole;
    uint32_t slot, each;  /* slots of one round */
    ddl__place own, work; /* where this rank's contribution is; where partial results go */
} ddl__halving;

static ddl__span ddl__halving_parts(const ddl__planner *p, const ddl__halving *h, int32_t first, int32_t end) {
    return ddl__span_parts(h->whole, h->fold.pow2, first, end, p->args->element_bytes);
}

/* Gives one half of low .. high away and reduces the other, until one part is left; the last result goes to OUT.
 * Returns which part that is. */
static int32_t ddl__halve(ddl__planner *p, const ddl__halving *h) {
    int32_t low = 0, high = h->fold.pow2, id = h->fold.id;
    uint32_t slot = h->slot;
    ddl__place at = h->own;
    for (int32_t k = 0; k < h->fold.rounds; k++, slot += h->each) {
        int32_t peer = ddl__fold_rank(&h->fold, id ^ (1 << k)), middle = (low + high) / 2;
        bool upper = (id >> k & 1) != 0;
        ddl__span give = ddl__halving_parts(p, h, upper ? low : middle, upper ? middle : high);
        ddl__span keep = ddl__halving_parts(p, h, upper ? middle : low, upper ? high : middle);
        ddl__place to = k == h->fold.rounds - 1 ? ddl__out : h->work;
        ddl__send_chunks(p, peer, slot, at, give);
        ddl__recv_reduce_chunks(p, peer, slot, at, to, keep, ddl__theirs_first(peer < p->args->rank));
        low = upper ? middle : low;
        high = upper ? high : middle;
        at = to;
    }
    return low;
}

/* The same partners in the other order; each gives all it has. */
static void ddl__double(ddl__planner *p, const ddl__halving *h, int32_t low) {
    uint32_t slot = h->slot + h->each * (uint32_t)h->fold.rounds;
    for (int32_t k = h->fold.rounds - 1, width = 1; k >= 0; k--, width *= 2, slot += h->each) {
        int32_t peer = ddl__fold_rank(&h->fold, h->fold.id ^ (1 << k));
        bool upper = (h->fold.id >> k & 1) != 0;
        int32_t theirs = upper ? low - width : low + width;
        ddl__send_chunks(p, peer, slot, ddl__out, ddl__halving_parts(p, h, low, low + width));
        ddl__recv_chunks(p, peer, slot, ddl__out, ddl__halving_parts(p, h, theirs, theirs + width));
        low = DDL__MIN(low, theirs);
    }
}

/* Without a fence, partial results stay in scratch until the last of the halving rounds has told of everybody. */
static void ddl__algo_all_reduce_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__halving h = {.fold = ddl__fold_of(args->size, args->rank), .whole = ddl__whole(args), .own = ddl__in};
    h.each = ddl__chunk_count(args, h.whole.bytes);
    uint32_t slot = ddl__plan_slots(p, h.each * (2 * (uint32_t)h.fold.rounds + 2));
    h.slot = slot + 2 * h.each;
    if (h.fold.id < 0) {
        ddl__send_chunks(p, args->rank + 1, slot, ddl__in, h.whole);
        ddl__recv_chunks(p, args->rank + 1, slot + h.each, ddl__out, h.whole);
        return;
    }
    h.work = p->fenced ? ddl__out : ddl__plan_tmp(p, h.whole);
    if (h.fold.folded) {
        ddl__recv_reduce_chunks(p, args->rank - 1, slot, ddl__in, h.work, h.whole, DDL__THEIRS_FIRST);
        h.own = h.work;
    }
    ddl__double(p, &h, ddl__halve(p, &h));
    if (h.fold.folded) {
        ddl__send_chunks(p, args->rank - 1, slot + h.each, ddl__out, h.whole);
    }
}

/* 2 log2 n alpha + 2 (n-1)/n M beta + (n-1)/n M gamma; to fold and unfold costs M both ways. */
static double ddl__cost_all_reduce_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (2 * t->byte + t->reduce);
    return fold + 2 * t->rounds * t->latency +
           (t->n - 1) / t->n * t->bytes * (2 * t->byte * t->crossing + t->reduce);
}

/* all_gather by doubling: each partner gives the run of blocks that it has. */
static bool ddl__can_all_gather_doubling(const ddl__plan_args *args) { return (args->size & (args->size - 1)) == 0; }

/* Runs of blocks are runs of memory only where blocks are equal, hence no v-form. With two ranks the only message is
 * the last one and may go to OUT; else blocks wait in scratch unless there was a fence. */
static void ddl__algo_all_gather_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    uint32_t each = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, each * (uint32_t)fold.rounds);
    bool direct = p->fenced || fold.rounds == 1;
    ddl__place to = direct ? ddl__out : ddl__plan_tmp(p, whole);
    if (fold.rounds > 1 && !(direct && args->in_place)) {
        ddl__plan_copy(p, own, to, mine);
    }
    for (int32_t k = 0, width = 1; k < fold.rounds; k++, width *= 2, slot += each) {
        int32_t first = args->rank / width * width, peer = args->rank ^ width, theirs = first ^ width;
        int64_t block = mine.bytes;
        ddl__send_chunks(p, peer, slot, k == 0 ? own : to, (ddl__span){first * block, width * block});
        ddl__recv_chunks(p, peer, slot, to, (ddl__span){theirs * block, width * block});
    }
    if (direct && (fold.rounds > 1 || args->in_place)) {
        return;
    }
    uint32_t join = ddl__plan_join(p);
    ddl__plan_after(p, direct ? ddl__plan_copy(p, own, ddl__out, mine) : ddl__plan_copy(p, to, ddl__out, whole), join);
}

/* log2 n alpha + (n-1)/n M beta */
static double ddl__cost_gather_doubling(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

/* reduce_scatter by halving: far partners first, so that a rank ends with its own block. Each of the pow2 members is
 * responsible for a run of blocks, of one rank or of two that were folded. */
static ddl__span ddl__fold_blocks(const ddl__plan_args *args, const ddl__fold *fold, int32_t first, int32_t end) {
    int32_t low = first < fold->extra ? 2 * first : first + fold->extra;
    int32_t high = end < fold->extra ? 2 * end : end + fold->extra;
    ddl__span begin = ddl__block(args, low), last = ddl__block(args, high - 1);
    return (ddl__span){begin.at, last.at + last.bytes - begin.at};
}

/* As in ddl__halve, but from far to near, and with runs of blocks for parts. The order of operands is lost. */
static void ddl__halve_blocks(ddl__planner *p, const ddl__fold *fold, uint32_t slot, uint32_t each, ddl__flow flow) {
    int32_t low = 0, high = fold->pow2;
    for (int32_t width = fold->pow2 / 2; width > 0; width /= 2, slot += each) {
        int32_t peer = ddl__fold_rank(fold, fold->id ^ width), middle = low + width;
        bool upper = (fold->id & width) != 0;
        ddl__span keep = ddl__fold_blocks(p->args, fold, upper ? middle : low, upper ? high : middle);
        ddl__span give = ddl__fold_blocks(p->args, fold, upper ? low : middle, upper ? middle : high);
        ddl__place to = width == 1 ? flow.last : flow.work;
        ddl__send_chunks(p, peer, slot, flow.own, give);
        ddl__recv_reduce_chunks(p, peer, slot, flow.own, to, keep, 0);
        low = upper ? middle : low;
        high = upper ? high : middle;
        flow.own = to;
    }
}

/* A folded rank ends with two blocks and gives the lower one to whom it belongs. */
static void ddl__algo_reduce_scatter_halving(ddl__planner *p, const ddl__plan_args *args) {
    ddl__fold fold = ddl__fold_of(args->size, args->rank);
    ddl__span whole = {0, ddl__total_bytes(args)}, mine = ddl__block(args, args->rank);
    ddl__place out = {DDL__OUT, -mine.at};
    uint32_t each = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, each * ((uint32_t)fold.rounds + 2));
    if (fold.id < 0) {
        ddl__send_chunks(p, args->rank + 1, slot, ddl__in, whole);
        ddl__recv_chunks(p, args->rank + 1, slot + each, out, mine);
        return;
    }
    ddl__place work = ddl__plan_tmp(p, whole);
    ddl__flow flow = {ddl__in, work, fold.folded ? work : out, 0};
    if (fold.folded) {
        ddl__recv_reduce_chunks(p, args->rank - 1, slot, ddl__in, work, whole, DDL__THEIRS_FIRST);
        flow.own = work;
    }
    ddl__halve_blocks(p, &fold, slot + 2 * each, each, flow);
    if (fold.folded) {
        ddl__send_chunks(p, args->rank - 1, slot + each, work, ddl__block(args, args->rank - 1));
        uint32_t join = ddl__plan_join(p);
        ddl__plan_after(p, ddl__plan_copy(p, work, out, mine), join);
    }
}

static double ddl__cost_reduce_scatter_halving(const ddl__terms *t) {
    double fold = ddl__is_pow2(t->n) ? 0 : 2 * t->latency + t->bytes * (t->byte + t->reduce);
    return fold + t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte * t->crossing + t->reduce);
}

/* >>algo/linear */
/* algo/linear: everybody talks to everybody directly: fewest hops for each byte, most messages. Also the algorithms
 * that reduce strictly in the order of ranks. */

/* A receive that must not write OUT yet lands in scratch: the last one to come tells that everybody made this call,
 * then all are copied. With two ranks the only receive is the last one. */
static bool ddl__must_stage(const ddl__planner *p) { return !p->fenced && p->args->size > 2; }

/* ((x0 op x1) op x2) ... of one chunk of this rank's part, whatever the size and shape of the group: the messages
 * come in any order but are reduced in the order of ranks. Rank n-1 ends with its own operand, the others with a
 * message. Only the last step writes `last`, except that rank n-1 moves there one step before when that is not in the
 * way of its own operand. */
static void ddl__fold_in_order(ddl__planner *p, uint32_t slot, ddl__place partial, ddl__place last, ddl__span chunk) {
    int32_t n = p->args->size, rank = p->args->rank;
    ddl__place at = ddl__in;
    for (int32_t r = 0; r < n; r++) {
        bool early = rank == n - 1 && r == n - 2 && !p->args->in_place;
        ddl__place to = r == n - 1 || early ? last : partial;
        if (r != rank) {
            if (r == 0) {
                ddl__plan_recv(p, r, slot, to, chunk);
            } else {
                ddl__plan_recv_reduce(p, r, slot, at, to, chunk, 0);
            }
        } else if (r == n - 1 && p->args->in_place) {
            ddl__plan_reduce(p, at, last, chunk, 0);
        } else if (r > 0) {
            to = at;
            ddl__plan_reduce(p, ddl__in, at, chunk, DDL__DST_FIRST);
        } else {
            to = ddl__in;
        }
        at = to;
    }
}

/* Everybody gives everybody its part: chunks of `cut`, from IN. The next rank first, so that not all begin with the
 * same one. */
static void ddl__give_parts(ddl__planner *p, const ddl__cut *cut, uint32_t slot) {
    const ddl__plan_args *args = p->args;
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank + i) % args->size;
        ddl__send_chunks(p, peer, slot, ddl__in, ddl__cut_part(cut, peer));
    }
}

/* Reduces this rank's part of the cut into `last`; where results are shared, each chunk goes to all as soon as it is
 * finished. */
static void ddl__fold_part(ddl__planner *p, const ddl__cut *cut, uint32_t slot, ddl__place last, bool share,
                           uint32_t share_slot) {
    const ddl__plan_args *args = p->args;
    ddl__span mine = ddl__cut_part(cut, args->rank);
    uint32_t chunks = mine.bytes > 0 ? ddl__chunk_count(args, mine.bytes) : 0;
    ddl__window window = ddl__plan_window(p, chunks, DDL__MIN(mine.bytes, ddl__chunk_bytes(args)));
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, mine, c);
        ddl__fold_in_order(p, slot + c, ddl__window_place(&window, c, chunk), last, chunk);
        for (int32_t i = 1; share && i < args->size; i++) {
            ddl__plan_send(p, (args->rank + i) % args->size, share_slot + c, last, chunk);
        }
    }
}

/* all_reduce: part r is reduced by rank r in the order of ranks, then given to all. */
static void ddl__algo_all_reduce_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__cut cut = {args, false, ddl__whole(args), args->size};
    uint32_t each = ddl__cut_chunks(&cut), slot = ddl__plan_slots(p, 2 * each);
    ddl__give_parts(p, &cut, slot);
    ddl__fold_part(p, &cut, slot, ddl__out, true, slot + each);
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank - i + args->size) % args->size;
        ddl__recv_chunks(p, peer, slot + each, ddl__out, ddl__cut_part(&cut, peer));
    }
}

/* Two hops whatever n is; messages leave one after the other. */
static double ddl__cost_all_reduce_direct(const ddl__terms *t) {
    return 2 * t->latency + 2 * (t->n - 2) * t->message +
           (t->n - 1) / t->n * t->bytes * (2 * t->byte * t->crossing + t->reduce);
}

/* What one rank sends another: a part to reduce and a part that is reduced. */
static int64_t ddl__peer_parts(const ddl__plan_args *args) {
    return 2 * ddl__span_part(ddl__whole(args), args->size, 0, args->element_bytes).bytes;
}

/* reduce_scatter in the order of ranks. */
static void ddl__algo_reduce_scatter_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__cut cut = {args, true, {0, 0}, args->size};
    uint32_t slot = ddl__plan_slots(p, ddl__cut_chunks(&cut));
    ddl__give_parts(p, &cut, slot);
    ddl__fold_part(p, &cut, slot, (ddl__place){DDL__OUT, -ddl__block(args, args->rank).at}, false, 0);
}

/* One hop, n - 1 messages one after the other. */
static double ddl__cost_spread(const ddl__terms *t) {
    return t->latency + (t->n - 2) * t->message + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

static double ddl__cost_reduce_scatter_direct(const ddl__terms *t) {
    return ddl__cost_spread(t) + (t->n - 1) / t->n * t->bytes * t->reduce;
}

/* reduce_scatter, pairwise: in step i give to rank + i and take from rank - i. */
static void ddl__algo_reduce_scatter_pairwise(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span mine = ddl__block(args, args->rank);
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__place partial = n > 2 ? ddl__plan_tmp(p, mine) : ddl__in, at = ddl__in;
    uint32_t heard = DDL__NO_STEP;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__plan_after(p, ddl__plan_send(p, to, slot, ddl__in, ddl__block(args, to)), heard);
        ddl__place dst = i == n - 1 ? (ddl__place){DDL__OUT, -mine.at} : partial;
        heard = ddl__plan_recv_reduce(p, from, slot, at, dst, mine, 0);
        at = dst;
    }
}

/* (n-1) alpha + (n-1)/n M (beta + gamma) */
static double ddl__cost_reduce_scatter_pairwise(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * (t->byte * t->crossing + t->reduce);
}

/* all_gather: in scratch the blocks stand in the order of the loop; nothing is copied to OUT, not even the own block,
 * before all have come. */
static void ddl__algo_all_gather_linear(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    bool stage = ddl__must_stage(p);
    ddl__span all = {0, ddl__total_bytes(args)};
    ddl__place tmp = stage ? ddl__plan_tmp(p, all) : ddl__out;
    uint32_t slot = ddl__plan_slots(p, 1);
    int64_t at = 0;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__span theirs = ddl__block(args, from);
        ddl__plan_send(p, to, slot, own, mine);
        ddl__plan_recv(p, from, slot, stage ? (ddl__place){DDL__TMP, tmp.base + at - theirs.at} : ddl__out, theirs);
        at += theirs.bytes;
    }
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, own, ddl__out, mine), join);
    }
    at = 0;
    for (int32_t i = 1; stage && i < n; i++) {
        ddl__span theirs = ddl__block(args, (args->rank - i + n) % n);
        ddl__place from = {DDL__TMP, tmp.base + at - theirs.at};
        ddl__plan_after(p, ddl__plan_copy(p, from, ddl__out, theirs), join);
        at += theirs.bytes;
    }
}

/* all_to_all. In place, a block is replaced by the one that comes from the rank it goes to, so what comes waits in
 * scratch. Empty blocks are sent too: only their sender knows that they are empty. */
typedef struct ddl__swap {
    uint32_t slot;
    bool stage, in_turn; /* in_turn: step i waits for what step i-1 received */
    ddl__place tmp;
} ddl__swap;

/* Step i exchanges with the ranks i above and below, so that nobody is everybody's target at once. */
static void ddl__swap_blocks(ddl__planner *p, const ddl__swap *swap) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    int64_t at = swap->tmp.base;
    uint32_t heard = DDL__NO_STEP;
    for (int32_t i = 1; i < n; i++) {
        int32_t to = (args->rank + i) % n, from = (args->rank - i + n) % n;
        ddl__span theirs = ddl__recv_block(args, from);
        uint32_t send = ddl__plan_send(p, to, swap->slot, ddl__in, ddl__block(args, to));
        ddl__plan_after(p, send, swap->in_turn ? heard : DDL__NO_STEP);
        heard = ddl__plan_recv(p, from, swap->slot, swap->stage ? (ddl__place){DDL__TMP, at - theirs.at} : ddl__out,
                               theirs);
        at += theirs.bytes;
    }
}

/* What stays on this rank, through scratch when the copy may run into blocks that have not left yet. */
static void ddl__swap_own(ddl__planner *p, uint32_t join, int64_t at) {
    ddl__span from = ddl__block(p->args, p->args->rank), to = ddl__recv_block(p->args, p->args->rank);
    if (!p->args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__IN, from.at - to.at}, ddl__out, to), join);
    } else if (from.at != to.at) {
        ddl__place tmp = {DDL__TMP, at - to.at};
        ddl__plan_copy(p, (ddl__place){DDL__IN, from.at - to.at}, tmp, to);
        ddl__plan_after(p, ddl__plan_copy(p, tmp, ddl__out, to), join);
    }
}

/* All that comes, the own block included. */
static int64_t ddl__recv_bytes(const ddl__plan_args *args) {
    int64_t bytes = 0;
    for (int32_t r = 0; r < args->size; r++) {
        bytes += ddl__recv_block(args, r).bytes;
    }
    return bytes;
}

/* The own block's place in scratch is behind those of the others. */
static void ddl__swap_all(ddl__planner *p, bool in_turn) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    ddl__swap swap = {.slot = ddl__plan_slots(p, 1), .in_turn = in_turn};
    swap.stage = ddl__must_stage(p) || args->in_place;
    ddl__span scratch = {0, swap.stage ? ddl__recv_bytes(args) : 0};
    swap.tmp = ddl__plan_tmp(p, scratch);
    ddl__swap_blocks(p, &swap);
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    ddl__swap_own(p, join, swap.tmp.base + scratch.bytes - ddl__recv_block(args, args->rank).bytes);
    int64_t at = swap.tmp.base;
    for (int32_t i = 1; swap.stage && i < n; i++) {
        ddl__span theirs = ddl__recv_block(args, (args->rank - i + n) % n);
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__TMP, at - theirs.at}, ddl__out, theirs), join);
        at += theirs.bytes;
    }
}

/* Everything at once: best when the network takes it. */
static void ddl__algo_all_to_all_linear(ddl__planner *p, const ddl__plan_args *args) {
    (void)args;
    ddl__swap_all(p, false);
}

/* One pair at a time: slower for small blocks, but no rank is sent more than it takes. */
static void ddl__algo_all_to_all_pairwise(ddl__planner *p, const ddl__plan_args *args) {
    (void)args;
    ddl__swap_all(p, true);
}

static double ddl__cost_all_to_all_pairwise(const ddl__terms *t) {
    return (t->n - 1) * t->latency + (t->n - 1) / t->n * t->bytes * t->byte * t->crossing;
}

/* gather: the root takes every block itself. */
static void ddl__algo_gather_linear(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__IN, -mine.at};
    if (args->rank != args->root) {
        ddl__plan_send(p, args->root, slot, own, mine);
        return;
    }
    bool stage = ddl__must_stage(p);
    int64_t first = ddl__plan_tmp(p, (ddl__span){0, stage ? ddl__total_bytes(args) : 0}).base, at = first;
    for (int32_t r = 0; r < args->size; r++) {
        ddl__span theirs = ddl__block(args, r);
        if (r != args->rank) {
            ddl__plan_recv(p, r, slot, stage ? (ddl__place){DDL__TMP, at - theirs.at} : ddl__out, theirs);
        }
        at += theirs.bytes;
    }
    uint32_t join = p->fenced ? DDL__NO_STEP : ddl__plan_join(p);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, own, ddl__out, mine), join);
    }
    at = first;
    for (int32_t r = 0; stage && r < args->size; r++) {
        ddl__span theirs = ddl__block(args, r);
        if (r != args->rank) {
            ddl__place tmp = {DDL__TMP, at - theirs.at};
            ddl__plan_after(p, ddl__plan_copy(p, tmp, ddl__out, theirs), join);
        }
        at += theirs.bytes;
    }
}

/* scatter: the root gives every block itself. */
static void ddl__algo_scatter_linear(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, 1);
    ddl__span mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__OUT, -mine.at};
    if (args->rank != args->root) {
        ddl__plan_recv(p, args->root, slot, own, mine);
        return;
    }
    for (int32_t i = 1; i < args->size; i++) {
        int32_t peer = (args->rank + i) % args->size;
        ddl__plan_send(p, peer, slot, ddl__in, ddl__block(args, peer));
    }
    if (!args->in_place) {
        ddl__plan_copy(p, ddl__in, own, mine);
    }
}

/* reduce in the order of ranks: the root takes every vector and reduces it itself. */
static void ddl__algo_reduce_direct(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window window = {0};
    if (args->rank == args->root) {
        window = ddl__plan_window(p, chunks, DDL__MIN(whole.bytes, ddl__chunk_bytes(args)));
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (args->rank == args->root) {
            ddl__fold_in_order(p, slot + c, ddl__window_place(&window, c, chunk), ddl__out, chunk);
        } else {
            ddl__plan_send(p, args->root, slot + c, ddl__in, chunk);
        }
    }
}

static double ddl__cost_reduce_direct(const ddl__terms *t) {
    return t->latency + (t->n - 2) * t->message + (t->n - 1) * t->bytes * (t->byte + t->reduce);
}

/* >>algo/bruck */
/* algo/bruck: log2 n rounds for any number of ranks, in scratch (Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient
 * algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8, 1997). For small data:
 * everything is copied before it is sent and once more at the end. */

/* The block in position i is that of rank + i; positions are packed. */
static ddl__span ddl__bruck_block(const ddl__plan_args *args, int32_t position) {
    return ddl__block(args, (args->rank + position) % args->size);
}

/* Bytes of some positions together. */
static int64_t ddl__bruck_bytes(const ddl__plan_args *args, int32_t from, int32_t positions) {
    int64_t bytes = 0;
    if (!ddl__kind_is_v(args->kind)) {
        return positions * ddl__block_bytes(args);
    }
    for (int32_t i = from; i < from + positions; i++) {
        bytes += ddl__bruck_block(args, i).bytes;
    }
    return bytes;
}

/* Collects every rank's block in scratch, own block first; returns the last receive, after which all is known. Round k
 * gives all that is known to rank - 2^k and takes as much from rank + 2^k. */
static uint32_t ddl__bruck_collect(ddl__planner *p, ddl__place tmp) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size;
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(n)), heard = DDL__NO_STEP;
    for (int32_t have = 1; have < n; have *= 2, slot++) {
        int32_t more = DDL__MIN(have, n - have);
        int64_t at = ddl__bruck_bytes(args, 0, have);
        ddl__span give = {0, ddl__bruck_bytes(args, 0, more)}, take = {at, ddl__bruck_bytes(args, have, more)};
        ddl__plan_after(p, ddl__plan_send(p, (args->rank - have + n) % n, slot, tmp, give), heard);
        uint32_t recv = ddl__plan_recv(p, (args->rank + have) % n, slot, tmp, take);
        ddl__plan_after(p, recv, heard);
        heard = recv;
    }
    return heard;
}

static void ddl__algo_all_gather_bruck(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size, rank = args->rank;
    ddl__place tmp = ddl__plan_tmp(p, (ddl__span){0, ddl__total_bytes(args)});
    ddl__span mine = ddl__block(args, rank);
    ddl__plan_copy(p, (ddl__place){DDL__IN, 0}, tmp, (ddl__span){0, mine.bytes});
    uint32_t heard = ddl__bruck_collect(p, tmp);
    /* Equal blocks: one copy up to the last rank's, one for those that come after it in scratch. */
    bool v = ddl__kind_is_v(args->kind);
    int64_t at = 0;
    for (int32_t i = 0, run = v ? 1 : n - rank; i < n; i += run, run = v ? 1 : rank) {
        ddl__span to = {ddl__bruck_block(args, i).at, ddl__bruck_bytes(args, i, run)};
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__TMP, tmp.base + at - to.at}, ddl__out, to), heard);
        at += to.bytes;
    }
}

/* As doubling, with every byte copied twice more. */
static double ddl__cost_gather_bruck(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * 3 * t->byte * t->crossing;
}

/* all_reduce of small data in the order of ranks: everybody collects all vectors and reduces them itself. */
static void ddl__algo_all_reduce_gather(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size;
    ddl__span whole = ddl__whole(args);
    ddl__plan_args each = *args;
    each.kind = DDL_ALL_GATHER;
    ddl__place tmp = ddl__plan_tmp(p, (ddl__span){0, n * whole.bytes});
    ddl__plan_copy(p, ddl__in, tmp, whole);
    p->args = &each;
    uint32_t heard = ddl__bruck_collect(p, tmp);
    p->args = args;
    ddl__place first = {DDL__TMP, tmp.base + (n - args->rank) % n * whole.bytes};
    for (int32_t r = 1; r < n; r++) {
        ddl__place next = {DDL__TMP, tmp.base + (r - args->rank + n) % n * whole.bytes};
        ddl__plan_after(p, ddl__plan_reduce(p, next, first, whole, DDL__DST_FIRST), heard);
    }
    ddl__plan_after(p, ddl__plan_copy(p, first, ddl__out, whole), heard);
}

/* ceil(log2 n) alpha + (n-1) M (beta + gamma): for short vectors only. */
static double ddl__cost_all_reduce_gather(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) * t->bytes * (t->byte * t->crossing + t->reduce);
}

static int64_t ddl__peer_half_of_all(const ddl__plan_args *args) {
    return (args->size + 1) / 2 * ddl__block_bytes(args);
}

/* all_to_all: blocks are first ordered by how far they go; round k moves those with bit k in their distance by 2^k.
 * Such blocks come in runs of 2^k, which are copied together, so there are about 2 n copies in all. */
typedef struct ddl__bruck_pack {
    ddl__place blocks, staged;
    int64_t block;
} ddl__bruck_pack;

/* Packs the runs of one round for sending, or puts what came back in their places; returns the bytes. */
static int64_t ddl__bruck_move(ddl__planner *p, const ddl__bruck_pack *pack, int32_t bit, bool back) {
    int64_t at = 0;
    for (int32_t i = bit; i < p->args->size; i += 2 * bit) {
        ddl__span run = {i * pack->block, DDL__MIN(bit, p->args->size - i) * pack->block};
        ddl__place staged = {DDL__TMP, pack->staged.base + at - run.at};
        ddl__plan_copy(p, back ? staged : pack->blocks, back ? pack->blocks : staged, run);
        at += run.bytes;
    }
    return at;
}

/* First IN is turned so that block i is the one that goes i ranks up; at the end block i is the one that came from i
 * ranks below. Rounds wait for each other even where their blocks do not: the last one must tell of all ranks. */
static void ddl__algo_all_to_all_bruck(ddl__planner *p, const ddl__plan_args *args) {
    int32_t n = args->size, rank = args->rank;
    int64_t block = ddl__block_bytes(args);
    ddl__bruck_pack pack = {.blocks = ddl__plan_tmp(p, (ddl__span){0, n * block}), .block = block};
    ddl__place rotated = {DDL__TMP, pack.blocks.base - rank * block};
    ddl__plan_copy(p, ddl__in, rotated, (ddl__span){rank * block, (n - rank) * block});
    rotated.base += n * block;
    ddl__plan_copy(p, ddl__in, rotated, (ddl__span){0, rank * block});
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(n)), heard = DDL__NO_STEP;
    for (int32_t bit = 1; bit < n; bit *= 2, slot++) {
        ddl__span half = {0, (n / 2 + 1) * block};
        pack.staged = ddl__plan_tmp(p, half);
        half.bytes = ddl__bruck_move(p, &pack, bit, false);
        ddl__plan_after(p, ddl__plan_send(p, (rank + bit) % n, slot, pack.staged, half), heard);
        pack.staged = ddl__plan_tmp(p, half);
        uint32_t recv = ddl__plan_recv(p, (rank - bit + n) % n, slot, pack.staged, half);
        ddl__plan_after(p, recv, heard);
        heard = recv;
        ddl__bruck_move(p, &pack, bit, true);
    }
    for (int32_t i = 0; i < n; i++) {
        ddl__span to = {(rank - i + n) % n * block, block};
        ddl__place from = {DDL__TMP, pack.blocks.base + i * block - to.at};
        ddl__plan_after(p, ddl__plan_copy(p, from, ddl__out, to), heard);
    }
}

static bool ddl__can_all_to_all_bruck(const ddl__plan_args *args) { return args->kind == DDL_ALL_TO_ALL; }

/* ceil(log2 n) (alpha + M/2 beta), with every byte copied before and after each round, piece by piece */
static double ddl__cost_all_to_all_bruck(const ddl__terms *t) {
    return t->rounds * (t->latency + t->message + t->bytes / 2 * (3 * t->byte * t->crossing));
}

/* >>algo/scan */
/* algo/scan: prefixes over the ranks, and gather and scatter along binomial trees. */

/* Recursive doubling of prefixes: Hillis and Steele, "Data parallel algorithms", CACM 29, 1986. After round k a rank
 * has the result of itself and the 2^(k+1) - 1 ranks below it. `first` is the lowest rank that takes part; `at` is
 * where this rank's operand is. Each result goes beside its operand, which may still be leaving; the last is OUT. */
static void ddl__scan_doubling(ddl__planner *p, int32_t first, uint32_t slot, ddl__place at, ddl__span whole) {
    int32_t n = p->args->size, rank = p->args->rank, k = 0;
    ddl__place beside[2] = {ddl__in, ddl__in};
    if (rank - first >= 2) {
        beside[0] = ddl__plan_tmp(p, whole);
        beside[1] = ddl__plan_tmp(p, whole);
    }
    for (int32_t distance = 1; distance < n - first; distance *= 2, k++) {
        if (rank + distance < n) {
            ddl__plan_send(p, rank + distance, slot + (uint32_t)k, at, whole);
        }
        if (rank - distance >= first) {
            ddl__place to = rank - 2 * distance < first ? ddl__out : beside[k % 2];
            ddl__plan_recv_reduce(p, rank - distance, slot + (uint32_t)k, at, to, whole, DDL__THEIRS_FIRST);
            at = to;
        }
    }
}

/* Rank 0 hears of nobody and may write at once. */
static void ddl__algo_scan_doubling(ddl__planner *p, const ddl__plan_args *args) {
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(args->size));
    ddl__scan_doubling(p, 0, slot, ddl__in, ddl__whole(args));
    if (args->rank == 0 && !args->in_place) {
        ddl__plan_copy(p, ddl__in, ddl__out, ddl__whole(args));
    }
}

/* exscan: everybody gives its operand to the next rank; what ranks 1 .. n-1 then have is scanned. */
static void ddl__algo_exscan_doubling(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t slot = ddl__plan_slots(p, ddl__log2_ceil(args->size) + 1);
    if (args->rank + 1 < args->size) {
        ddl__plan_send(p, args->rank + 1, slot, ddl__in, whole);
    }
    if (args->rank == 0) {
        return;
    }
    ddl__place at = args->rank == 1 ? ddl__out : ddl__plan_tmp(p, whole);
    ddl__plan_recv(p, args->rank - 1, slot, at, whole);
    ddl__scan_doubling(p, 1, slot + 1, at, whole);
}

/* ceil(log2 n) (alpha + M (beta + gamma)) */
static double ddl__cost_scan_doubling(const ddl__terms *t) {
    return t->rounds * (t->latency + t->bytes * (t->byte + t->reduce));
}

/* Along the line of ranks, chunk by chunk. */
static void ddl__algo_scan_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (args->rank > 0) {
            ddl__plan_recv_reduce(p, args->rank - 1, slot + c, ddl__in, ddl__out, chunk, DDL__THEIRS_FIRST);
        } else if (!args->in_place) {
            ddl__plan_copy(p, ddl__in, ddl__out, chunk);
        }
        if (args->rank + 1 < args->size) {
            ddl__plan_send(p, args->rank + 1, slot + c, args->rank == 0 ? ddl__in : ddl__out, chunk);
        }
    }
}

/* What came is the result; what goes on is that op own, which is made in scratch. */
static void ddl__algo_exscan_chain(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span whole = ddl__whole(args);
    int32_t rank = args->rank;
    bool inner = rank > 0 && rank + 1 < args->size;
    uint32_t chunks = ddl__chunk_count(args, whole.bytes), slot = ddl__plan_slots(p, chunks);
    ddl__window came = {0}, goes = {0};
    if (inner) {
        int64_t each = DDL__MIN(whole.bytes, ddl__chunk_bytes(args));
        came = ddl__plan_window(p, chunks, each);
        goes = ddl__plan_window(p, chunks, each);
    }
    for (uint32_t c = 0; c < chunks; c++) {
        ddl__span chunk = ddl__chunk(args, whole, c);
        if (rank == 0) {
            ddl__plan_send(p, 1, slot + c, ddl__in, chunk);
        } else if (!inner) {
            ddl__plan_recv(p, rank - 1, slot + c, ddl__out, chunk);
        } else {
            ddl__place theirs = ddl__window_place(&came, c, chunk), ours = ddl__window_place(&goes, c, chunk);
            ddl__plan_recv(p, rank - 1, slot + c, theirs, chunk);
            ddl__plan_copy(p, ddl__in, ours, chunk);
            ddl__plan_reduce(p, theirs, ours, chunk, 0);
            ddl__plan_send(p, rank + 1, slot + c, ours, chunk);
            ddl__plan_copy(p, theirs, ddl__out, chunk);
        }
    }
}

/* >>algo-spread: gather and scatter along a binomial tree. Blocks are packed in the order of distance from the root,
 * in which a subtree is one run. */
static ddl__span ddl__packed_subtree(const ddl__plan_args *args, int32_t rank) {
    int32_t n = args->size, v = (rank - args->root + n) % n, lowest = v & -v;
    int32_t end = v == 0 || lowest > n - v ? n : v + lowest;
    if (!ddl__kind_is_v(args->kind)) {
        int64_t block = ddl__block_bytes(args);
        return (ddl__span){v * block, (end - v) * block};
    }
    ddl__span span = {0, 0};
    for (int32_t u = 0; u < end; u++) {
        int64_t bytes = ddl__block(args, (u + args->root) % n).bytes;
        span.at += u < v ? bytes : 0;
        span.bytes += u < v ? 0 : bytes;
    }
    return span;
}

/* Copies the blocks of all ranks but the root between the larger tensor and packed scratch; equal blocks in two runs,
 * up to the last rank's and from the first one's. */
static void ddl__spread_copy(ddl__planner *p, ddl__place tmp, bool unpack, uint32_t join) {
    const ddl__plan_args *args = p->args;
    int32_t n = args->size, root = args->root;
    bool v = ddl__kind_is_v(args->kind);
    int64_t at = ddl__block(args, root).bytes;
    for (int32_t u = 1; u < n;) {
        int32_t rank = (u + root) % n, run = v ? 1 : rank > root ? n - rank : root - rank;
        ddl__span blocks = {ddl__block(args, rank).at, v ? ddl__block(args, rank).bytes : run * at};
        int64_t packed = v ? at : u * at;
        ddl__place scratch = {DDL__TMP, tmp.base + packed - blocks.at};
        ddl__plan_after(p, ddl__plan_copy(p, unpack ? scratch : ddl__in, unpack ? ddl__out : scratch, blocks), join);
        at += v ? blocks.bytes : 0;
        u += run;
    }
}

/* Each rank gives its whole subtree to its parent in one message. The root unpacks when it has heard all children. */
static void ddl__algo_gather_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span run = ddl__packed_subtree(args, args->rank), mine = ddl__block(args, args->rank);
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree.child_count == 0) {
        ddl__plan_send(p, tree.parent, slot, (ddl__place){DDL__IN, -run.at}, run);
        return;
    }
    ddl__place tmp = ddl__plan_tmp(p, run);
    for (int32_t i = 0; i < tree.child_count; i++) {
        ddl__plan_recv(p, tree.child[i], slot, tmp, ddl__packed_subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__plan_copy(p, (ddl__place){DDL__IN, -run.at}, tmp, (ddl__span){run.at, mine.bytes});
        uint32_t join = ddl__plan_join(p);
        ddl__plan_after(p, ddl__plan_send(p, tree.parent, slot, tmp, run), join);
        return;
    }
    uint32_t join = ddl__plan_join(p);
    ddl__spread_copy(p, tmp, true, join);
    if (!args->in_place) {
        ddl__plan_after(p, ddl__plan_copy(p, (ddl__place){DDL__IN, -mine.at}, ddl__out, mine), join);
    }
}

/* ceil(log2 n) alpha + (n-1)/n M beta at the root, and the copy in and out of scratch */
static double ddl__cost_spread_tree(const ddl__terms *t) {
    return t->rounds * t->latency + (t->n - 1) / t->n * t->bytes * 2 * t->byte;
}

/* The same downwards: the root packs, each child takes the run of its subtree out of what came. */
static void ddl__algo_scatter_tree(ddl__planner *p, const ddl__plan_args *args) {
    ddl__tree tree = ddl__tree_binomial(args->size, args->rank, args->root);
    ddl__span run = ddl__packed_subtree(args, args->rank), mine = ddl__block(args, args->rank);
    ddl__place own = {DDL__OUT, -mine.at};
    uint32_t slot = ddl__plan_slots(p, 1);
    if (tree.child_count == 0) {
        ddl__plan_recv(p, tree.parent, slot, own, mine);
        return;
    }
    ddl__place tmp = ddl__plan_tmp(p, run);
    if (tree.parent >= 0) {
        ddl__plan_recv(p, tree.parent, slot, tmp, run);
    } else {
        ddl__spread_copy(p, tmp, false, DDL__NO_STEP);
    }
    for (int32_t i = tree.child_count - 1; i >= 0; i--) {
        ddl__plan_send(p, tree.child[i], slot, tmp, ddl__packed_subtree(args, tree.child[i]));
    }
    if (tree.parent >= 0) {
        ddl__plan_copy(p, (ddl__place){DDL__TMP, tmp.base + run.at - mine.at}, own, mine);
    } else if (!args->in_place) {
        ddl__plan_copy(p, ddl__in, own, mine);
    }
}

/* >>algo/native */
/* algo/native: plans that leave the ranks of one host to a transport which reaches them all by load and store. Within
 * one host that is the whole plan; across hosts it is the inner level of the hierarchy. The transport reduces in the
 * order of ranks, keeps "buffers untouched" by comparing signatures before it writes, and never lets a rank end while
 * another may touch its memory. */

static bool ddl__can_native(const ddl__plan_args *args) { return args->native_s > 0 && ddl__host_count(args) == 1; }

/* The one step has no other to be ordered against: what it touches does not matter. */
static void ddl__algo_native(ddl__planner *p, const ddl__plan_args *args) {
    ddl__span block = {0, args->count * args->element_bytes};
    ddl__plan_native(p, args->kind, args->root, ddl__in, block, args->kind == DDL_BROADCAST ? ddl__in : ddl__out,
                     block);
}

static double ddl__cost_native(const ddl__terms *t) { return t->native; }

/* >>algo-native-hierarchy: all_reduce across hosts: native reduce-scatter, the ring of the ranks that have the same
 * part, native all-gather (BlueConnect, see ring.h). What is left when the ranks of a host cannot share elements evenly
 * is reduced natively on each of them and goes round the same ring: all bits stay equal, as all rings are alike. */
static bool ddl__can_native_hierarchy(const ddl__plan_args *args) {
    return args->native_s > 0 && ddl__can_hierarchy(args);
}

static void ddl__algo_all_reduce_native_hierarchy(ddl__planner *p, const ddl__plan_args *args) {
    ddl__ring inside = ddl__ring_of(args, true), across = ddl__ring_of(args, false);
    int64_t block = args->count / inside.size * args->element_bytes;
    ddl__span even = {0, block * inside.size}, mine = {block * inside.index, block};
    ddl__span rest = {even.bytes, ddl__whole(args).bytes - even.bytes};
    uint32_t native = DDL__NO_STEP;
    if (block > 0) {
        native = ddl__plan_native(p, DDL_REDUCE_SCATTER, 0, ddl__in, even, ddl__out, mine);
        ddl__ring_all_reduce(p, &across, &(ddl__cut){args, false, mine, across.size});
    }
    if (rest.bytes > 0) { /* one after the other, as operations of a set are */
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_REDUCE, 0, ddl__in, rest, ddl__out, rest), native);
        native = p->step_count - 1;
        ddl__ring_all_reduce(p, &across, &(ddl__cut){args, false, rest, across.size});
    }
    if (block > 0) {
        ddl__plan_after(p, ddl__plan_native(p, DDL_ALL_GATHER, 0, ddl__out, mine, ddl__out, even), native);
    }
}

/* Inside as measured of the transport, between hosts as in the hierarchy of rings. */
static double ddl__cost_native_hierarchy(const ddl__terms *t) {
    double h = t->hosts;
    return 2 * t->native + 2 * (h - 1) * t->latency + (h - 1) / h * t->bytes * (2 * t->byte + t->reduce / t->per_host);
}

/* >>algo/table */
/* algo/table: all algorithms, by kind and name, and how a plan is made by one of them. */

/* In each kind, earlier ones win ties. The names are what users write in DDL_ALGO.
 * Each kind has one that serves every call: any number of ranks, ops that do not commute, rank order, the v-form; so
 * that choosing cannot fail. */
static const ddl__algo ddl__algos[] = {
    {"dissemination", DDL_BARRIER, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_barrier, ddl__cost_barrier,
     ddl__peer_nothing},
    {"tree", DDL_BARRIER, DDL__RANK_ORDER, NULL, ddl__algo_barrier_tree, ddl__cost_barrier_tree, ddl__peer_nothing},
    {"tree", DDL_BROADCAST, DDL__RANK_ORDER, NULL, ddl__algo_broadcast_tree, ddl__cost_broadcast_tree, ddl__peer_once},
    {"chain", DDL_BROADCAST, DDL__RANK_ORDER, NULL, ddl__algo_broadcast_chain, ddl__cost_broadcast_chain,
     ddl__peer_once},
    {"scatter_all_gather", DDL_BROADCAST, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_broadcast_scatter,
     ddl__cost_broadcast_scatter, ddl__peer_twice},
    {"double_tree", DDL_BROADCAST, DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_broadcast_double_tree,
     ddl__cost_broadcast_double_tree, ddl__peer_once},
    {"tree", DDL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_reduce_tree, ddl__cost_reduce_tree, ddl__peer_once},
    {"chain", DDL_REDUCE, 0, NULL, ddl__algo_reduce_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"reduce_scatter_gather", DDL_REDUCE, DDL__FENCES, NULL, ddl__algo_reduce_scatter_gather,
     ddl__cost_reduce_scatter_gather, ddl__peer_twice},
    {"double_tree", DDL_REDUCE, DDL__FENCES, NULL, ddl__algo_reduce_double_tree, ddl__cost_reduce_double_tree,
     ddl__peer_once},
    {"direct", DDL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_reduce_direct, ddl__cost_reduce_direct, ddl__peer_once},
    {"recursive_doubling", DDL_ALL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_all_reduce_doubling,
     ddl__cost_all_reduce_doubling, ddl__peer_once},
    {"halving_doubling", DDL_ALL_REDUCE, DDL__KEEPS_ORDER, NULL, ddl__algo_all_reduce_halving,
     ddl__cost_all_reduce_halving, ddl__peer_once},
    {"ring", DDL_ALL_REDUCE, 0, NULL, ddl__algo_all_reduce_ring, ddl__cost_all_reduce_ring, ddl__peer_twice},
    {"double_tree", DDL_ALL_REDUCE, DDL__FENCES, NULL, ddl__algo_all_reduce_double_tree,
     ddl__cost_all_reduce_double_tree, ddl__peer_twice},
    {"hierarchical", DDL_ALL_REDUCE, DDL__FENCES, ddl__can_hierarchy, ddl__algo_all_reduce_hierarchy,
     ddl__cost_all_reduce_hierarchy, ddl__peer_twice},
    {"native_hierarchical", DDL_ALL_REDUCE, DDL__FENCES, ddl__can_native_hierarchy,
     ddl__algo_all_reduce_native_hierarchy, ddl__cost_native_hierarchy, ddl__peer_twice},
    {"direct", DDL_ALL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_all_reduce_direct, ddl__cost_all_reduce_direct,
     ddl__peer_parts},
    {"all_gather", DDL_ALL_REDUCE, DDL__RANK_ORDER, NULL, ddl__algo_all_reduce_gather, ddl__cost_all_reduce_gather,
     ddl__peer_half_of_all},
    {"linear", DDL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_gather_linear, ddl__cost_spread,
     ddl__peer_block},
    {"tree", DDL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_gather_tree, ddl__cost_spread_tree,
     ddl__peer_once},
    {"linear", DDL_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_scatter_linear, ddl__cost_spread,
     ddl__peer_block},
    {"tree", DDL_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_scatter_tree, ddl__cost_spread_tree,
     ddl__peer_once},
    {"linear", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_gather_linear, ddl__cost_spread,
     ddl__peer_block},
    {"recursive_doubling", DDL_ALL_GATHER, DDL__RANK_ORDER, ddl__can_all_gather_doubling,
     ddl__algo_all_gather_doubling, ddl__cost_gather_doubling, ddl__peer_once},
    {"bruck", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_gather_bruck,
     ddl__cost_gather_bruck, ddl__peer_once},
    {"ring", DDL_ALL_GATHER, DDL__SERVES_V | DDL__RANK_ORDER | DDL__FENCES, NULL, ddl__algo_all_gather_ring,
     ddl__cost_gather_ring, ddl__peer_once},
    {"recursive_halving", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_halving,
     ddl__cost_reduce_scatter_halving, ddl__peer_once},
    {"pairwise", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_pairwise,
     ddl__cost_reduce_scatter_pairwise, ddl__peer_block},
    {"ring", DDL_REDUCE_SCATTER, DDL__SERVES_V, NULL, ddl__algo_reduce_scatter_ring, ddl__cost_reduce_scatter_ring,
     ddl__peer_once},
    {"direct", DDL_REDUCE_SCATTER, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_reduce_scatter_direct,
     ddl__cost_reduce_scatter_direct, ddl__peer_block},
    {"linear", DDL_ALL_TO_ALL, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_to_all_linear, ddl__cost_spread,
     ddl__peer_block},
    {"bruck", DDL_ALL_TO_ALL, DDL__RANK_ORDER, ddl__can_all_to_all_bruck, ddl__algo_all_to_all_bruck,
     ddl__cost_all_to_all_bruck, ddl__peer_half_of_all},
    {"pairwise", DDL_ALL_TO_ALL, DDL__SERVES_V | DDL__RANK_ORDER, NULL, ddl__algo_all_to_all_pairwise,
     ddl__cost_all_to_all_pairwise, ddl__peer_block},
    {"recursive_doubling", DDL_SCAN, DDL__KEEPS_ORDER, NULL, ddl__algo_scan_doubling, ddl__cost_scan_doubling,
     ddl__peer_once},
    {"chain", DDL_SCAN, DDL__RANK_ORDER, NULL, ddl__algo_scan_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"recursive_doubling", DDL_EXSCAN, DDL__KEEPS_ORDER, NULL, ddl__algo_exscan_doubling, ddl__cost_scan_doubling,
     ddl__peer_twice},
    {"chain", DDL_EXSCAN, DDL__RANK_ORDER, NULL, ddl__algo_exscan_chain, ddl__cost_reduce_chain, ddl__peer_once},
    {"native", DDL_BARRIER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_BROADCAST, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_REDUCE, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_ALL_REDUCE, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_GATHER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_SCATTER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_ALL_GATHER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_REDUCE_SCATTER, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native,
     ddl__peer_nothing},
    {"native", DDL_ALL_TO_ALL, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_SCAN, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
    {"native", DDL_EXSCAN, DDL__RANK_ORDER, ddl__can_native, ddl__algo_native, ddl__cost_native, ddl__peer_nothing},
};

/* NULL: this kind has no algorithm of that name. A v-form has those of its kind. */
static const ddl__algo *ddl__algo_find(ddl_kind kind, const char *name) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        const ddl__algo *algo = &ddl__algos[i];
        if (algo->kind == ddl__kind_base(kind) && strcmp(algo->name, name) == 0) {
            return algo;
        }
    }
    return NULL;
}

/* Whether an algorithm gives the right result for a call. rank_order: only those whose bits are those of
 * ((x0 op x1) op x2) ...; with up to three ranks, keeping the order leaves no other bracketing. */
static bool ddl__algo_can(const ddl__algo *algo, const ddl__plan_args *args, bool rank_order) {
    if (algo->kind != ddl__kind_base(args->kind)) {
        return false;
    }
    if (ddl__kind_is_v(args->kind) && !ddl__algo_has(algo, DDL__SERVES_V)) {
        return false;
    }
    if (!args->commutative && !ddl__algo_has(algo, DDL__KEEPS_ORDER)) {
        return false;
    }
    uint32_t order = args->size <= 3 ? DDL__KEEPS_ORDER : DDL__RANK_ORDER;
    if (rank_order && !ddl__algo_has(algo, order)) {
        return false;
    }
    return algo->can == NULL || algo->can(args);
}

/* In an all_to_allv nobody knows how much others send, so nobody could decide alike without a fence. */
static bool ddl__algo_fences(const ddl__algo *algo, const ddl__plan_args *args) {
    return ddl__algo_has(algo, DDL__FENCES) || args->kind == DDL_ALL_TO_ALLV;
}

/* A group of one: the operand is the result. In place only an all_to_allv can have to move it. */
static void ddl__plan_alone(ddl__planner *p, const ddl__plan_args *args) {
    ddl_kind kind = ddl__kind_base(args->kind);
    if (kind == DDL_ALL_TO_ALL) {
        ddl__span block = {0, ddl__recv_block(args, 0).bytes};
        ddl__swap_own(p, DDL__NO_STEP, ddl__plan_tmp(p, block).base);
        return;
    }
    if (args->in_place || kind == DDL_BARRIER || kind == DDL_BROADCAST || kind == DDL_EXSCAN) {
        return;
    }
    ddl__span block = ddl__kind_is_v(args->kind) ? ddl__block(args, 0) : ddl__whole(args);
    bool out_is_larger = kind == DDL_GATHER || kind == DDL_ALL_GATHER;
    ddl__place in = {DDL__IN, out_is_larger ? -block.at : 0}, out = {DDL__OUT, out_is_larger ? 0 : -block.at};
    ddl__plan_copy(p, in, out, block);
}

/* Nothing to move, but whoever calls something else must still hear of it. The v-forms know only their own blocks. */
static bool ddl__plan_is_empty(const ddl__plan_args *args) {
    switch (ddl__kind_base(args->kind)) {
    case DDL_ALL_REDUCE:
    case DDL_ALL_GATHER:
    case DDL_REDUCE_SCATTER:
    case DDL_ALL_TO_ALL:
        return args->kind != DDL_ALL_TO_ALLV && ddl__total_bytes(args) == 0;
    default:
        return false;
    }
}

static void ddl__plan_begin(ddl__planner *p, const ddl__plan_args *args) {
    if (args->kind == DDL_BROADCAST) {
        ddl__plan_fence_up(p);
    } else {
        ddl__plan_fence(p);
    }
}

/* Writes the plan of one rank. Errors: DDL_ERR_NOMEM. Free with ddl__plan_free. */
static ddl_status ddl__plan_make(ddl__base *base, const ddl__algo *algo, const ddl__plan_args *args, ddl__plan *out) {
    ddl__planner planner;
    ddl__plan_open(&planner, base, args);
    if (args->size == 1) {
        ddl__plan_alone(&planner, args);
    } else {
        bool empty = ddl__plan_is_empty(args);
        if (empty || args->fence || ddl__algo_fences(algo, args)) {
            ddl__plan_begin(&planner, args);
        }
        if (!empty) {
            algo->plan(&planner, args);
        }
    }
    ddl_status status = ddl__plan_finish(&planner, out);
    out->algorithm = algo->name;
    return status;
}

/* >>tune */
/* tune: chooses the algorithm of a call, how finely it is cut, and whether it begins with a fence. Every rank must
 * choose alike without asking, so nothing here may look at what only this rank knows: its rank, whether its buffers
 * are in place, its lengths of an all_to_allv. */

#define DDL__CHUNK_BYTES (256 * 1024)
#define DDL__MIN_CHUNK_BYTES (32 * 1024)
#define DDL__MAX_CHUNK_BYTES (1024 * 1024)
#define DDL__MAX_CHUNKS 512 /* of one vector: bounds the length of plans */

/* Settings of a group, the same on every rank. */
typedef struct ddl__tuning {
    ddl__cost_model model;
    int64_t eager_bytes; /* a plan that sends more to one peer begins with a fence; 0: the default */
    int64_t chunk_bytes; /* 0: by the model */
    bool deterministic;  /* reduce in rank order */
    const ddl__algo *forced[DDL_ALL_TO_ALLV + 1]; /* by base kind; NULL: by the model */
} ddl__tuning;

typedef struct ddl__choice {
    const ddl__algo *algo;
    int64_t chunk_bytes;
    bool fence;
    double seconds;
} ddl__choice;

/* Typical of shared memory and of 10 Gbit/s Ethernet; for who has not measured. */
static const ddl__cost_model ddl__model_default = {{2e-6, 30e-6}, {0.2e-9, 1e-9}, 0.1e-9, 0.3e-6, 1};

/* Large vectors take larger chunks, so that a plan stays short. */
static int64_t ddl__tune_chunk(const ddl__tuning *tuning, const ddl__plan_args *args, int64_t wanted) {
    if (tuning->chunk_bytes > 0) {
        return tuning->chunk_bytes;
    }
    int64_t total = ddl__total_bytes(args);
    while (total / wanted > DDL__MAX_CHUNKS) {
        wanted *= 2;
    }
    return wanted;
}

/* Tries sizes of chunks. The default comes first, so that it wins where size makes no difference; a vector that is one
 * chunk anyway is tried once. Whether a fence is needed follows from the bytes to one peer alone: it must not depend on
 * what this rank sends. */
static void ddl__tune_chunks(const ddl__tuning *tuning, ddl__plan_args *args, const ddl__algo *algo,
                             ddl__choice *best) {
    ddl__terms terms;
    bool fence = algo->peer_bytes(args) > (tuning->eager_bytes > 0 ? tuning->eager_bytes : DDL__EAGER_BYTES);
    bool fenced = fence || ddl__algo_fences(algo, args);
    for (int64_t next = DDL__MIN_CHUNK_BYTES / 2, wanted = DDL__CHUNK_BYTES; next <= DDL__MAX_CHUNK_BYTES;
         next *= 2, wanted = next) {
        args->chunk_bytes = ddl__tune_chunk(tuning, args, wanted);
        ddl__terms_of(&terms, args, &tuning->model);
        double seconds = algo->cost(&terms) + (fenced ? terms.rounds * terms.latency : 0);
        if (best->algo == NULL || seconds < best->seconds) {
            *best = (ddl__choice){algo, args->chunk_bytes, fence, seconds};
        }
        if (terms.bytes <= DDL__MIN_CHUNK_BYTES) {
            break;
        }
    }
}

/* Chooses for a call; a forced algorithm that cannot serve it (an op that is not commutative, hosts of unequal size)
 * gives way to the best that can. Needs no memory and cannot fail: every kind has an algorithm that always fits. */
static ddl__choice ddl__tune_choose(const ddl__tuning *tuning, const ddl__plan_args *args) {
    ddl__plan_args common = *args;
    common.rank = 0;
    common.in_place = false;
    ddl__choice best = {0};
    const ddl__algo *forced = tuning->forced[ddl__kind_base(args->kind)];
    if (forced == NULL && args->native_s > 0) {
        const ddl__algo *native = ddl__algo_find(args->kind, "native"); /* no plan of messages comes near */
        forced = native != NULL && ddl__algo_can(native, &common, tuning->deterministic) ? native : NULL;
    }
    if (forced != NULL && ddl__algo_can(forced, &common, tuning->deterministic)) {
        ddl__tune_chunks(tuning, &common, forced, &best);
    }
    bool served = best.algo != NULL;
    for (size_t i = 0; !served && i < DDL__COUNT_OF(ddl__algos); i++) {
        if (ddl__algo_can(&ddl__algos[i], &common, tuning->deterministic)) {
            ddl__tune_chunks(tuning, &common, &ddl__algos[i], &best);
        }
    }
    best.fence = best.fence && args->size > 1;
    best.seconds = args->size > 1 ? best.seconds : 0;
    return best;
}

/* >>tune-names: DDL_ALGO. "ring", "auto", or by operation: "all_reduce=ring,broadcast=tree". */

/* Names of a kind's algorithms, of all kinds' when it is DDL_KIND_NONE. */
static void ddl__tune_list(ddl__text *text, ddl_kind kind) {
    ddl__text_add(text, "auto");
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__algos); i++) {
        bool known = kind != DDL_KIND_NONE && ddl__algos[i].kind != kind;
        for (size_t j = 0; j < i && kind == DDL_KIND_NONE; j++) {
            known = known || strcmp(ddl__algos[j].name, ddl__algos[i].name) == 0;
        }
        if (!known) {
            ddl__text_add(text, ", %s", ddl__algos[i].name);
        }
    }
}

/* Operations are named without the v: both forms share algorithms. */
static ddl_kind ddl__tune_kind(const char *name, size_t length) {
    for (int kind = DDL_BARRIER; kind <= DDL_EXSCAN; kind++) {
        const char *known = ddl__kind_name((ddl_kind)kind);
        if (strlen(known) == length && memcmp(known, name, length) == 0) {
            return (ddl_kind)kind;
        }
    }
    return DDL_KIND_NONE;
}

/* Forces one name for a kind, or for every kind that has it. */
static bool ddl__tune_force(ddl__tuning *tuning, ddl_kind kind, const char *name) {
    bool found = false;
    for (int k = DDL_BARRIER; k <= DDL_EXSCAN; k++) {
        const ddl__algo *algo = ddl__algo_find((ddl_kind)k, name);
        bool is_auto = strcmp(name, "auto") == 0;
        if ((kind == DDL_KIND_NONE || kind == (ddl_kind)k) && (algo != NULL || is_auto)) {
            tuning->forced[k] = algo;
            found = true;
        }
    }
    return found;
}

/* One entry: "name" or "operation=name". */
static ddl_status ddl__tune_entry(ddl__tuning *tuning, const char *entry, ddl__sentence *error) {
    const char *equals = strchr(entry, '=');
    const char *name = equals != NULL ? equals + 1 : entry;
    ddl_kind kind = equals != NULL ? ddl__tune_kind(entry, (size_t)(equals - entry)) : DDL_KIND_NONE;
    if (equals != NULL && kind == DDL_KIND_NONE) {
        return ddl__fail(error, DDL_ERR_ARG,
                         "algorithm setting \"%s\" names no operation: use barrier, broadcast, reduce, all_reduce, "
                         "gather, scatter, all_gather, reduce_scatter, all_to_all, scan or exscan",
                         entry);
    }
    if (ddl__tune_force(tuning, kind, name)) {
        return DDL_OK;
    }
    char names[400];
    ddl__text list = {names, sizeof names, 0};
    ddl__tune_list(&list, kind);
    return kind == DDL_KIND_NONE
               ? ddl__fail(error, DDL_ERR_ARG, "no operation has an algorithm \"%s\": use one of %s", name, names)
               : ddl__fail(error, DDL_ERR_ARG, "%s has no algorithm \"%s\": use one of %s", ddl__kind_name(kind), name,
                           names);
}

/* Reads DDL_ALGO into tuning->forced; entries that are not named stay as they are. Errors: DDL_ERR_ARG with a sentence
 * that lists the valid names; tuning is unchanged then. */
static ddl_status ddl__tune_parse(ddl__tuning *tuning, const char *text, ddl__sentence *error) {
    ddl__tuning parsed = *tuning;
    for (const char *at = text; *at != '\0';) {
        char entry[64]; /* longer than any operation and algorithm together */
        size_t length = strcspn(at, ","), begin = strspn(at, " "), end = length;
        while (end > begin && at[end - 1] == ' ') {
            end--;
        }
        begin = DDL__MIN(begin, end);
        if (end - begin >= sizeof entry) {
            return ddl__fail(error, DDL_ERR_ARG, "algorithm setting \"%.80s\" is too long", at);
        }
        memcpy(entry, at + begin, end - begin);
        entry[end - begin] = '\0';
        if (entry[0] != '\0') {
            DDL__TRY(ddl__tune_entry(&parsed, entry, error));
        }
        at += length + (at[length] == ',');
    }
    *tuning = parsed;
    return DDL_OK;
}

/* >>tune-cache: DDL_TUNE_CACHE. A line is the shape's key and four figures: latency and seconds per byte, inside a host
 * and between hosts. */

/* What a measurement can come to: outside, a figure is damage, and would make the model's numbers overflow. */
#define DDL__FIGURE_MIN 1e-12
#define DDL__FIGURE_MAX 1e7

/* Returns the line's bytes. */
static size_t ddl__model_write(char *out, size_t cap, uint64_t key, const double figures[4]) {
    ddl__text line = {out, cap, 0};
    ddl__text_add(&line, "%llx %.9g %.9g %.9g %.9g\n", (unsigned long long)key, figures[0], figures[1], figures[2],
                  figures[3]);
    return line.used;
}

/* False: it is no such line, or its figures are none. */
static bool ddl__model_parse(const char *line, uint64_t *out_key, double figures[4]) {
    size_t digits = strspn(line, "0123456789abcdef");
    if (digits == 0 || digits > 16 || line[digits] != ' ') { /* strtoull takes 0x as well */
        return false;
    }
    char *at;
    *out_key = strtoull(line, &at, 16);
    for (int i = 0; i < 4; i++) {
        const char *from = at;
        figures[i] = *from == ' ' ? strtod(from, &at) : 0;
        if (at == from || !(figures[i] >= DDL__FIGURE_MIN && figures[i] <= DDL__FIGURE_MAX)) { /* a NaN is not */
            return false;
        }
    }
    return *at == '\n' || *at == 0;
}

/* >>wire/crc32c */
/* crc32c: the checksum of frame headers and, when asked for, of payloads.
 * CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected; RFC 3720 B.4), the one that x86 computes in hardware. This part
 * knows nothing of frames, and it has no mutable state: the tables are constants, the processor is asked each time. */

#if defined(__x86_64__) && defined(__GNUC__)
#define DDL__CRC32C_X86 1
#include <nmmintrin.h>
#include <wmmintrin.h>
#endif

/* Little-endian words at any address; one load or store each on most machines. */
static inline uint32_t ddl__load_le32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    return value;
}

static inline uint64_t ddl__load_le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline void ddl__store_le32(uint8_t *p, uint32_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    memcpy(p, &value, 4);
}

static inline void ddl__store_le64(uint8_t *p, uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    memcpy(p, &value, 8);
}

/* A CRC is linear: the entry for a byte is the XOR of the entries for its bits. So each table of slice-by-8 (Kounavis
 * and Berry, "A Systematic Approach to Building High Performance Software-based CRC Generators", 2005) is given by its
 * eight one-bit entries, lowest bit first, and the preprocessor writes out the 256. */
#define DDL__CRC_1(x, a) (x), ((x) ^ a)
#define DDL__CRC_2(x, a, b) DDL__CRC_1(x, a), DDL__CRC_1((x) ^ b, a)
#define DDL__CRC_3(x, a, b, c) DDL__CRC_2(x, a, b), DDL__CRC_2((x) ^ c, a, b)
#define DDL__CRC_4(x, a, b, c, d) DDL__CRC_3(x, a, b, c), DDL__CRC_3((x) ^ d, a, b, c)
#define DDL__CRC_5(x, a, b, c, d, e) DDL__CRC_4(x, a, b, c, d), DDL__CRC_4((x) ^ e, a, b, c, d)
#define DDL__CRC_6(x, a, b, c, d, e, f) DDL__CRC_5(x, a, b, c, d, e), DDL__CRC_5((x) ^ f, a, b, c, d, e)
#define DDL__CRC_7(x, a, b, c, d, e, f, g) DDL__CRC_6(x, a, b, c, d, e, f), DDL__CRC_6((x) ^ g, a, b, c, d, e, f)
#define DDL__CRC_8(a, b, c, d, e, f, g, h)                                                                             \
    { DDL__CRC_7(0u, a, b, c, d, e, f, g), DDL__CRC_7(h, a, b, c, d, e, f, g) }

/* Table t advances a byte past t further bytes of zeros. */
static const uint32_t ddl__crc32c_table[8][256] = {
    DDL__CRC_8(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu, 0x20bd8edeu, 0x417b1dbcu, 0x82f63b78u),
    DDL__CRC_8(0x13a29877u, 0x274530eeu, 0x4e8a61dcu, 0x9d14c3b8u, 0x3fc5f181u, 0x7f8be302u, 0xff17c604u, 0xfbc3faf9u),
    DDL__CRC_8(0xa541927eu, 0x4f6f520du, 0x9edea41au, 0x38513ec5u, 0x70a27d8au, 0xe144fb14u, 0xc76580d9u, 0x8b277743u),
    DDL__CRC_8(0xdd45aab8u, 0xbf672381u, 0x7b2231f3u, 0xf64463e6u, 0xe964b13du, 0xd725148bu, 0xaba65fe7u, 0x52a0c93fu),
    DDL__CRC_8(0x38116facu, 0x7022df58u, 0xe045beb0u, 0xc5670b91u, 0x8f2261d3u, 0x1ba8b557u, 0x37516aaeu, 0x6ea2d55cu),
    DDL__CRC_8(0xef306b19u, 0xdb8ca0c3u, 0xb2f53777u, 0x6006181fu, 0xc00c303eu, 0x85f4168du, 0x0e045bebu, 0x1c08b7d6u),
    DDL__CRC_8(0x68032cc8u, 0xd0065990u, 0xa5e0c5d1u, 0x4e2dfd53u, 0x9c5bfaa6u, 0x3d5b83bdu, 0x7ab7077au, 0xf56e0ef4u),
    DDL__CRC_8(0x493c7d27u, 0x9278fa4eu, 0x211d826du, 0x423b04dau, 0x847609b4u, 0x0d006599u, 0x1a00cb32u, 0x34019664u),
};

/* The raw register in, the raw register out: the inversions of the standard are in ddl__crc32c. */
static inline uint32_t ddl__crc32c_portable(uint32_t crc, const uint8_t *p, size_t bytes) {
    const uint32_t(*t)[256] = ddl__crc32c_table;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t w = ddl__load_le64(p) ^ crc;
        crc = t[7][w & 255] ^ t[6][(w >> 8) & 255] ^ t[5][(w >> 16) & 255] ^ t[4][(w >> 24) & 255] ^
              t[3][(w >> 32) & 255] ^ t[2][(w >> 40) & 255] ^ t[1][(w >> 48) & 255] ^ t[0][w >> 56];
    }
    for (; bytes > 0; bytes--, p++) {
        crc = (crc >> 8) ^ t[0][(crc ^ *p) & 255];
    }
    return crc;
}

#ifdef DDL__CRC32C_X86
/* The instruction takes 3 cycles and starts every cycle, so a long buffer is read as three lanes side by side; their
 * registers are joined by multiplying with x^(8n-33) modulo the polynomial, n = bytes that a lane is followed by
 * (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011). */
#define DDL__CRC32C_LANE 512

__attribute__((target("sse4.2,pclmul"))) static inline uint32_t ddl__crc32c_lanes(uint32_t crc, const uint8_t *p) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < DDL__CRC32C_LANE; i += 8) {
        a = _mm_crc32_u64(a, ddl__load_le64(p + i));
        b = _mm_crc32_u64(b, ddl__load_le64(p + DDL__CRC32C_LANE + i));
        c = _mm_crc32_u64(c, ddl__load_le64(p + 2 * DDL__CRC32C_LANE + i));
    }
    __m128i shift = _mm_set_epi64x(0xdd7e3b0c, 0x170076fa); /* past one lane, past two */
    __m128i joined = _mm_xor_si128(_mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a), shift, 0x00),
                                   _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b), shift, 0x10));
    return (uint32_t)(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(joined)) ^ c);
}

__attribute__((target("sse4.2"))) static inline uint32_t ddl__crc32c_x86(uint32_t crc, const uint8_t *p, size_t bytes) {
    uint64_t wide = crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        wide = _mm_crc32_u64(wide, ddl__load_le64(p));
    }
    crc = (uint32_t)wide;
    if (bytes >= 4) {
        crc = _mm_crc32_u32(crc, ddl__load_le32(p));
        bytes -= 4;
        p += 4;
    }
    for (; bytes > 0; bytes--, p++) {
        crc = _mm_crc32_u8(crc, *p);
    }
    return crc;
}
#endif

/* CRC-32C of data. Start with 0; a buffer may come in pieces, each call taking the result of the one before. */
static inline uint32_t ddl__crc32c(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
#ifdef DDL__CRC32C_X86
    if (__builtin_cpu_supports("sse4.2")) {
        if (bytes >= 3 * DDL__CRC32C_LANE && __builtin_cpu_supports("pclmul")) {
            for (; bytes >= 3 * DDL__CRC32C_LANE; bytes -= 3 * DDL__CRC32C_LANE, p += 3 * DDL__CRC32C_LANE) {
                crc = ddl__crc32c_lanes(crc, p);
            }
        }
        return ~ddl__crc32c_x86(crc, p, bytes);
    }
#endif
    return ~ddl__crc32c_portable(crc, p, bytes);
}

/* >>wire/frame */
/* frame: the 48 bytes in front of everything that ranks say to each other, and the bounded reader and writer for the
 * fields of control messages. It knows bytes; what a frame asks for is the mesh's affair.
 *
 *     offset  0  magic        u32  "ddl1"
 *             4  version      u8   DDL__WIRE_MAJOR
 *             5  type         u8   enum ddl__frame_type
 *             6  flags        u16  the type's own; the top bit says that payload_crc is filled in
 *             8  bytes        u32  of the payload that follows, at most 1 MiB; more data is more frames
 *            12  source       u32  world rank of the sender
 *            16  group        u32
 *            20  epoch        u32  frames of another epoch are dropped
 *            24  sequence     u64
 *            32  signature    u64  hash of the group's collective calls so far; equal on all ranks, or a mismatch
 *            40  payload_crc  u32
 *            44  header_crc   u32  CRC-32C of bytes 0..43
 *     all little-endian. */

#define DDL__FRAME_BYTES 48
#define DDL__FRAME_MAX_PAYLOAD (1u << 20)
#define DDL__FRAME_MAGIC 0x316c6464u /* "ddl1" read as a little-endian word */
#define DDL__FRAME_FLAG_CRC 0x8000u  /* payload_crc covers the payload */
#define DDL__DEAD_LINK 1u            /* flag of DEAD: only a link was lost; the hosts of that rank know better */
/* A minor version adds; a major one is refused in the handshake, so a frame of another version is damage or a bug. */
#define DDL__WIRE_MAJOR 1
#define DDL__WIRE_MINOR 0

enum ddl__frame_type {
    DDL__FRAME_P2P = 1, /* eager message: envelope and data */
    DDL__FRAME_RTS = 2, /* rendezvous: request to send, clear to send, data */
    DDL__FRAME_CTS = 3,
    DDL__FRAME_DATA = 4,
    DDL__FRAME_COLL = 5,
    DDL__FRAME_CREDIT = 6,
    DDL__FRAME_QUERY = 7, /* stall report: what are you doing; the answer */
    DDL__FRAME_STATUS = 8,
    DDL__FRAME_MISMATCH = 9,
    DDL__FRAME_DEAD = 10,
    DDL__FRAME_ABORT = 11,
    DDL__FRAME_BYE = 12,
    DDL__FRAME_PING = 13,
    DDL__FRAME_GROUP = 14,
    DDL__FRAME_AGREE = 15,
    DDL__FRAME_TYPE_MAX = 15
};

typedef struct ddl__frame {
    uint8_t type;
    uint16_t flags;
    uint32_t bytes, source, group, epoch;
    uint64_t sequence, signature;
    uint32_t payload_crc;
} ddl__frame;

/* Writes a header. The sender is trusted to keep bytes and type in range; the receiver is not so kind. */
static inline void ddl__frame_write(uint8_t out[DDL__FRAME_BYTES], const ddl__frame *f) {
    /* In words of 8 bytes, as it is read for the checksum and sent on: what was written in halves is not forwarded. */
    uint32_t kind = DDL__WIRE_MAJOR | (uint32_t)f->type << 8 | (uint32_t)f->flags << 16;
    ddl__store_le64(out, DDL__FRAME_MAGIC | (uint64_t)kind << 32);
    ddl__store_le64(out + 8, f->bytes | (uint64_t)f->source << 32);
    ddl__store_le64(out + 16, f->group | (uint64_t)f->epoch << 32);
    ddl__store_le64(out + 24, f->sequence);
    ddl__store_le64(out + 32, f->signature);
    ddl__store_le32(out + 40, f->payload_crc);
    ddl__store_le32(out + 44, ddl__crc32c(0, out, 44));
}

/* Reads a header: copied once, since shared memory may change under us, and checked once. What it returns can be
 * trusted in form; whether source, group and epoch mean anything is for the mesh to see. *out is untouched on error.
 * Errors: DDL_ERR_CORRUPT, DDL_ERR_VERSION. */
static inline ddl_status ddl__frame_read(const uint8_t in[DDL__FRAME_BYTES], ddl__frame *out) {
    uint8_t h[DDL__FRAME_BYTES];
    memcpy(h, in, sizeof(h));
    if (ddl__load_le32(h) != DDL__FRAME_MAGIC || ddl__load_le32(h + 44) != ddl__crc32c(0, h, 44)) {
        return DDL_ERR_CORRUPT;
    }
    uint32_t word = ddl__load_le32(h + 4), bytes = ddl__load_le32(h + 8);
    if ((word & 255) != DDL__WIRE_MAJOR) {
        return DDL_ERR_VERSION;
    }
    uint8_t type = (uint8_t)(word >> 8);
    if (bytes > DDL__FRAME_MAX_PAYLOAD || type < DDL__FRAME_P2P || type > DDL__FRAME_TYPE_MAX) {
        return DDL_ERR_CORRUPT;
    }
    out->type = type;
    out->flags = (uint16_t)(word >> 16);
    out->bytes = bytes;
    out->source = ddl__load_le32(h + 12);
    out->group = ddl__load_le32(h + 16);
    out->epoch = ddl__load_le32(h + 20);
    out->sequence = ddl__load_le64(h + 24);
    out->signature = ddl__load_le64(h + 32);
    out->payload_crc = ddl__load_le32(h + 40);
    return DDL_OK;
}

/* True when the payload of f->bytes is what the sender sent, or the sender did not say. */
static inline int ddl__frame_payload_ok(const ddl__frame *f, const void *payload) {
    return (f->flags & DDL__FRAME_FLAG_CRC) == 0 || ddl__crc32c(0, payload, f->bytes) == f->payload_crc;
}

/* Fields of a control message, one after the other, little-endian, no padding. bad is sticky: read or write all, then
 * look once. A bad reader gives zeros, so that what it fills is never uninitialised. at <= bytes always holds, and so
 * every check is n > bytes - at, which cannot overflow. */
typedef struct ddl__reader {
    const uint8_t *data;
    size_t bytes, at;
    int bad;
} ddl__reader;

typedef struct ddl__writer {
    uint8_t *data;
    size_t cap, at;
    int bad;
} ddl__writer;

static inline ddl__reader ddl__reader_of(const void *data, size_t bytes) {
    return (ddl__reader){(const uint8_t *)data, bytes, 0, 0};
}

static inline ddl__writer ddl__writer_of(void *data, size_t cap) { return (ddl__writer){(uint8_t *)data, cap, 0, 0}; }

/* The next n bytes in place, or NULL when there are not so many. n == 0 may give NULL as well. */
static inline const uint8_t *ddl__get_view(ddl__reader *r, size_t n) {
    if (r->bad || n > r->bytes - r->at) {
        r->bad = 1;
        return NULL;
    }
    const uint8_t *p = n == 0 ? NULL : r->data + r->at;
    r->at += n;
    return p;
}

static inline uint64_t ddl__get_int(ddl__reader *r, size_t n) {
    uint8_t le[8] = {0};
    const uint8_t *p = ddl__get_view(r, n);
    if (p != NULL) {
        memcpy(le, p, n);
    }
    return ddl__load_le64(le);
}

static inline uint8_t ddl__get_u8(ddl__reader *r) { return (uint8_t)ddl__get_int(r, 1); }
static inline uint16_t ddl__get_u16(ddl__reader *r) { return (uint16_t)ddl__get_int(r, 2); }
static inline uint32_t ddl__get_u32(ddl__reader *r) { return (uint32_t)ddl__get_int(r, 4); }
static inline uint64_t ddl__get_u64(ddl__reader *r) { return ddl__get_int(r, 8); }

/* Copies n bytes; n is the room at out, never a number from the wire. */
static inline void ddl__get_bytes(ddl__reader *r, void *out, size_t n) {
    const uint8_t *p = ddl__get_view(r, n);
    if (p != NULL) {
        memcpy(out, p, n);
    } else if (n > 0) {
        memset(out, 0, n);
    }
}

/* A string is a u16 length and so many bytes, none of them 0. It must fit in cap with its terminator: bad otherwise,
 * and out is "" then. What peers say in words ends up in sentences and on terminals: control characters become '?'. */
static inline void ddl__get_string(ddl__reader *r, char *out, size_t cap) {
    size_t n = ddl__get_u16(r);
    const uint8_t *p = ddl__get_view(r, n);
    if (r->bad || n >= cap || (n > 0 && memchr(p, 0, n) != NULL)) {
        r->bad = 1;
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = p[i] < 32 || p[i] == 127 ? '?' : (char)p[i];
    }
    if (cap > 0) {
        out[n] = '\0';
    }
}

static inline void ddl__put_bytes(ddl__writer *w, const void *data, size_t n) {
    if (w->bad || n > w->cap - w->at) {
        w->bad = 1;
    } else if (n > 0) {
        memcpy(w->data + w->at, data, n);
        w->at += n;
    }
}

static inline void ddl__put_int(ddl__writer *w, uint64_t value, size_t n) {
    uint8_t le[8];
    ddl__store_le64(le, value);
    ddl__put_bytes(w, le, n);
}

static inline void ddl__put_u8(ddl__writer *w, uint8_t value) { ddl__put_int(w, value, 1); }
static inline void ddl__put_u16(ddl__writer *w, uint16_t value) { ddl__put_int(w, value, 2); }
static inline void ddl__put_u32(ddl__writer *w, uint32_t value) { ddl__put_int(w, value, 4); }
static inline void ddl__put_u64(ddl__writer *w, uint64_t value) { ddl__put_int(w, value, 8); }

/* Strings that get_string would refuse (longer than 65,535 bytes) make the writer bad. */
static inline void ddl__put_string(ddl__writer *w, const char *text) {
    size_t n = strlen(text);
    if (n > UINT16_MAX) {
        w->bad = 1;
        return;
    }
    ddl__put_u16(w, (uint16_t)n);
    ddl__put_bytes(w, text, n);
}

/* >>wire/sha256 */
/* sha256: what the handshake is made of: SHA-256 (FIPS 180-4), HMAC-SHA256 (RFC 2104), constant-time comparison, wiping
 * and random bytes. A job makes a handful of MACs for each connection, so this is short rather than fast. */

typedef struct ddl__sha256 {
    uint32_t state[8];
    uint64_t bytes; /* hashed so far; the low 6 bits say how full block is */
    uint8_t block[64];
} ddl__sha256;

/* Zeroes memory that held a secret. The barrier tells the compiler that somebody looks, or it drops the stores. */
static void ddl__wipe(void *memory, size_t bytes) {
    if (bytes > 0) {
        memset(memory, 0, bytes);
    }
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* Compares in a time that depends on bytes alone: how far a forgery agrees must not show. */
static int ddl__ct_equal(const void *a, const void *b, size_t bytes) {
    const volatile uint8_t *x = (const volatile uint8_t *)a, *y = (const volatile uint8_t *)b;
    uint8_t difference = 0;
    for (size_t i = 0; i < bytes; i++) {
        difference = (uint8_t)(difference | (x[i] ^ y[i]));
    }
    return difference == 0;
}

static void ddl__sha256_store(uint8_t *out, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    }
}

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
/* NOT a hash, and no protection: a keyed mixing that a fuzzer can afford a hundred thousand times a second, so that it
 * reaches the states behind the proofs. Only the macro that fuzzers agree on (libFuzzer, OSS-Fuzz) brings it in. */
static void ddl__sha256_block(uint32_t state[8], const uint8_t block[64]) {
    uint64_t lanes[4], words[8];
    memcpy(lanes, state, sizeof(lanes));
    memcpy(words, block, sizeof(words));
    for (size_t i = 0; i < 8; i++) {
        uint64_t x = (lanes[i & 3] ^ words[i]) * 0x9E3779B97F4A7C15u;
        lanes[i & 3] = x ^ x >> 32;
        lanes[(i + 1) & 3] += lanes[i & 3];
    }
    for (size_t i = 0; i < 8; i++) { /* so that the last word reaches all lanes */
        lanes[(i + 1) & 3] += (lanes[i & 3] ^ lanes[i & 3] >> 29) * 0xBF58476D1CE4E5B9u;
    }
    memcpy(state, lanes, sizeof(lanes));
}
#else
static const uint32_t ddl__sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t ddl__sha256_rotate(uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

static void ddl__sha256_schedule(uint32_t w[64], const uint8_t block[64]) {
    for (size_t i = 0; i < 16; i++) {
        const uint8_t *p = block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (size_t i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        uint32_t s0 = ddl__sha256_rotate(a, 7) ^ ddl__sha256_rotate(a, 18) ^ (a >> 3);
        uint32_t s1 = ddl__sha256_rotate(b, 17) ^ ddl__sha256_rotate(b, 19) ^ (b >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
}

/* FIPS 180-4, 6.2.2. */
static void ddl__sha256_block(uint32_t state[8], const uint8_t block[64]) {
    uint32_t w[64];
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    ddl__sha256_schedule(w, block);
    for (size_t i = 0; i < 64; i++) {
        uint32_t s1 = ddl__sha256_rotate(e, 6) ^ ddl__sha256_rotate(e, 11) ^ ddl__sha256_rotate(e, 25);
        uint32_t s0 = ddl__sha256_rotate(a, 2) ^ ddl__sha256_rotate(a, 13) ^ ddl__sha256_rotate(a, 22);
        uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + ddl__sha256_k[i] + w[i];
        uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    ddl__wipe(w, sizeof(w)); /* the schedule of a key block gives the key */
}
#endif

static void ddl__sha256_init(ddl__sha256 *h) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof(start));
    h->bytes = 0;
}

static void ddl__sha256_update(ddl__sha256 *h, const void *data, size_t bytes) {
    const uint8_t *p = (const uint8_t *)data;
    while (bytes > 0) {
        size_t at = h->bytes & 63, room = 64 - at, n = bytes < room ? bytes : room;
        memcpy(h->block + at, p, n);
        h->bytes += n;
        p += n;
        bytes -= n;
        if (n == room) {
            ddl__sha256_block(h->state, h->block);
        }
    }
}

static void ddl__sha256_final(ddl__sha256 *h, uint8_t out[32]) {
    static const uint8_t padding[64] = {0x80};
    uint8_t length[8];
    ddl__sha256_store(length, h->bytes * 8, 8);
    /* 0x80 and zeros up to 8 bytes before the end of a block */
    ddl__sha256_update(h, padding, 1 + ((55 - h->bytes) & 63));
    ddl__sha256_update(h, length, 8);
    for (size_t i = 0; i < 8; i++) {
        ddl__sha256_store(out + 4 * i, h->state[i], 4);
    }
    ddl__wipe(h, sizeof(*h));
}

/* A key after its two blocks are hashed. Whoever keeps this need not keep the secret, and each MAC is half the work. */
typedef struct ddl__hmac_key {
    uint32_t inner[8], outer[8];
} ddl__hmac_key;

static void ddl__hmac_key_half(uint32_t state[8], const uint8_t key[64], uint8_t pad) {
    ddl__sha256 h;
    uint8_t block[64];
    for (size_t i = 0; i < 64; i++) {
        block[i] = key[i] ^ pad;
    }
    ddl__sha256_init(&h);
    ddl__sha256_block(h.state, block);
    memcpy(state, h.state, sizeof(h.state));
    ddl__wipe(block, sizeof(block));
    ddl__wipe(&h, sizeof(h));
}

/* Any length of secret; a long one is hashed first, as RFC 2104 says. */
static void ddl__hmac_key_init(ddl__hmac_key *key, const void *secret, size_t bytes) {
    uint8_t block[64] = {0};
    if (bytes > sizeof(block)) {
        ddl__sha256 h;
        ddl__sha256_init(&h);
        ddl__sha256_update(&h, secret, bytes);
        ddl__sha256_final(&h, block);
    } else if (bytes > 0) {
        memcpy(block, secret, bytes);
    }
    ddl__hmac_key_half(key->inner, block, 0x36);
    ddl__hmac_key_half(key->outer, block, 0x5c);
    ddl__wipe(block, sizeof(block));
}

static void ddl__hmac_begin(ddl__sha256 *h, const ddl__hmac_key *key) {
    memcpy(h->state, key->inner, sizeof(h->state));
    h->bytes = 64;
}

static void ddl__hmac_end(ddl__sha256 *h, const ddl__hmac_key *key, uint8_t out[32]) {
    uint8_t inner[32];
    ddl__sha256_final(h, inner);
    memcpy(h->state, key->outer, sizeof(h->state));
    h->bytes = 64;
    ddl__sha256_update(h, inner, sizeof(inner));
    ddl__sha256_final(h, out);
}

/* The whole of it for one message. */
static __attribute__((unused)) void ddl__hmac_sha256(const void *secret, size_t secret_bytes, const void *data,
                                                     size_t bytes, uint8_t out[32]) {
    ddl__hmac_key key;
    ddl__sha256 h;
    ddl__hmac_key_init(&key, secret, secret_bytes);
    ddl__hmac_begin(&h, &key);
    ddl__sha256_update(&h, data, bytes);
    ddl__hmac_end(&h, &key, out);
    ddl__wipe(&key, sizeof(key));
}

/* For kernels and sandboxes without the system call. */
static ddl_status ddl__random_from_file(uint8_t *out, size_t bytes) {
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return DDL_ERR_SYSTEM;
    }
    while (bytes > 0) {
        ssize_t n = read(fd, out, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        out += n;
        bytes -= (size_t)n;
    }
    close(fd);
    return bytes == 0 ? DDL_OK : DDL_ERR_SYSTEM;
}

/* Fills out with random bytes from the kernel. On DDL_ERR_SYSTEM out must not be used. */
static ddl_status ddl__random(void *out, size_t bytes) {
    uint8_t *p = (uint8_t *)out;
    while (bytes > 0) {
        ssize_t n = getrandom(p, bytes, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return ddl__random_from_file(p, bytes);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return DDL_OK;
}

/* >>wire/auth */
/* auth: the handshake that every connection begins with. Both sides prove that they hold the job's secret, the server
 * first, before a byte of anything else is parsed. A pure machine: bytes in, bytes out; no sockets, no clock, no
 * allocation, and no size that comes from the wire. The caller limits how long and how often.
 *
 *     HELLO      client   0  magic "ddlh", major u8, minor u8, kind u8 = 1, purpose u8
 *                         8  job u64, rank u32, target rank u32, world u32, epoch u32, client nonce [32]
 *     CHALLENGE  server  64  magic "ddlh", major u8, minor u8, kind u8 = 2, purpose u8
 *                        72  rank u32, epoch u32, server nonce [32], MAC(secret, "ddl1 server") [32]
 *     PROOF      client 144  MAC(secret, "ddl1 client") [32]
 *     VERDICT    server 176  kind u8 = 4, code u8, 0 u16, MAC(k, "ddl1 verdict") [32]
 *                       212  end;   k = MAC(secret, "ddl1 key") over bytes 0..175
 *
 * Offsets are in the conversation, which both sides keep whole: MAC(key, label) is HMAC-SHA256 over the label, padded
 * with zeros to 16 bytes, and every byte of the conversation before the MAC. So roles, purpose, job, versions, ranks,
 * world, epoch and both nonces are all inside, a label keeps one side's proof from serving as the other's, and a nonce
 * keeps yesterday's from serving today. Integers are little-endian.
 *
 * The first 8 bytes of HELLO and CHALLENGE keep this shape in all versions. Another major version is refused after
 * them: the server answers with the same 8 bytes of its own, so that both sides can name both versions. To somebody who
 * has not proven the secret the server says no more than that; a wrong job, world or rank is told after the proof. */

#define DDL__AUTH_MAGIC 0x686c6464u /* "ddlh" */
#define DDL__AUTH_MAX_OUT 80        /* a step never writes more than this */
#define DDL__AUTH_BYTES 212         /* the whole conversation */
#define DDL__RANK_ANY UINT32_MAX    /* store only: a client without a rank, or "whoever serves" */

enum ddl__auth_purpose { DDL__AUTH_STORE = 1, DDL__AUTH_MESH = 2 };
enum ddl__auth_role { DDL__AUTH_CLIENT = 1, DDL__AUTH_SERVER = 2 };

/* Why a handshake was refused. On the wire in VERDICT; values never change. */
enum ddl__auth_code {
    DDL__AUTH_OK = 0,
    DDL__AUTH_PROOF = 1, /* the MAC is wrong: another secret, or none */
    DDL__AUTH_VERSION = 2,
    DDL__AUTH_JOB = 3,
    DDL__AUTH_WORLD = 4,
    DDL__AUTH_RANK = 5,
    DDL__AUTH_DUPLICATE = 6,
    DDL__AUTH_PURPOSE = 7,
    DDL__AUTH_NOT_DDL = 8 /* never sent: what came was no handshake */
};

typedef struct ddl__auth_params {
    const uint8_t *secret; /* not needed after ddl__auth_client/_server; 0 bytes: something else vouches for the peer */
    size_t secret_bytes;
    uint64_t job;
    uint8_t purpose;
    uint32_t rank;  /* mine */
    uint32_t peer;  /* client: whom I mean to reach; server: not used */
    uint32_t world; /* a store's server may say 0: any */
    uint32_t epoch; /* shown to the peer, not compared: the mesh knows which epochs it admits */
} ddl__auth_params;

/* The conversation in sections. A prefix is a section of its own so that strangers are known by 8 bytes. */
enum ddl__auth_section {
    DDL__AUTH_S_HELLO8,
    DDL__AUTH_S_HELLO,
    DDL__AUTH_S_CHALLENGE8,
    DDL__AUTH_S_CHALLENGE,
    DDL__AUTH_S_PROOF,
    DDL__AUTH_S_VERDICT
};

typedef struct ddl__auth {
    /* results; peer_* of a server are claims until DDL_OK */
    uint32_t peer_rank, peer_world, peer_epoch;
    uint16_t peer_version; /* major << 8 | minor, known from the first 8 bytes on, else 0 */
    uint8_t code;          /* enum ddl__auth_code, when it was refused */
    uint8_t key[32];       /* session key, on DDL_OK */
    /* private */
    uint8_t role, purpose, section, refusal;
    uint16_t at; /* bytes of the conversation that went either way */
    ddl_status status, failure;
    uint32_t rank, peer, world;
    uint64_t job;
    ddl__hmac_key secret;
    uint8_t wire[DDL__AUTH_BYTES];
} ddl__auth;

static void ddl__auth_mac(const ddl__auth *a, const ddl__hmac_key *key, const char *label, size_t bytes,
                          uint8_t out[32]) {
    ddl__sha256 h;
    char padded[16] = {0};
    memcpy(padded, label, strlen(label));
    ddl__hmac_begin(&h, key);
    ddl__sha256_update(&h, padded, sizeof(padded));
    ddl__sha256_update(&h, a->wire, bytes);
    ddl__hmac_end(&h, key, out);
}

static int ddl__auth_mac_ok(const ddl__auth *a, const ddl__hmac_key *key, const char *label, size_t bytes) {
    uint8_t expected[32];
    ddl__auth_mac(a, key, label, bytes, expected);
    int same = ddl__ct_equal(expected, a->wire + bytes, sizeof(expected));
    ddl__wipe(expected, sizeof(expected));
    return same;
}

static void ddl__auth_fail(ddl__auth *a, ddl_status status, uint8_t code) {
    a->status = status;
    a->code = code;
}

static void ddl__auth_put_prefix(ddl__writer *w, uint8_t kind, uint8_t purpose) {
    ddl__put_u32(w, DDL__AUTH_MAGIC);
    ddl__put_u8(w, DDL__WIRE_MAJOR);
    ddl__put_u8(w, DDL__WIRE_MINOR);
    ddl__put_u8(w, kind);
    ddl__put_u8(w, purpose);
}

static ddl_status ddl__auth_start(ddl__auth *a, const ddl__auth_params *p, uint8_t role) {
    int store = p->purpose == DDL__AUTH_STORE;
    if ((!store && p->purpose != DDL__AUTH_MESH) || (p->secret == NULL && p->secret_bytes > 0) ||
        (p->rank >= p->world && !(store && (p->rank == DDL__RANK_ANY || p->world == 0)))) {
        return DDL_ERR_ARG;
    }
    memset(a, 0, sizeof(*a));
    a->role = role;
    a->purpose = p->purpose;
    a->status = DDL_IN_PROGRESS;
    a->rank = p->rank;
    a->peer = p->peer;
    a->world = p->world;
    a->job = p->job;
    ddl__hmac_key_init(&a->secret, p->secret, p->secret_bytes);
    return DDL_OK;
}

/* Begins as client. nonce: 32 bytes of ddl__random, never used before. Errors: DDL_ERR_ARG. */
static ddl_status ddl__auth_client(ddl__auth *a, const ddl__auth_params *p, const uint8_t nonce[32]) {
    if (p->world == 0 || (p->peer >= p->world && !(p->purpose == DDL__AUTH_STORE && p->peer == DDL__RANK_ANY))) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__auth_start(a, p, DDL__AUTH_CLIENT));
    ddl__writer w = ddl__writer_of(a->wire, 64);
    ddl__auth_put_prefix(&w, 1, p->purpose);
    ddl__put_u64(&w, p->job);
    ddl__put_u32(&w, p->rank);
    ddl__put_u32(&w, p->peer);
    ddl__put_u32(&w, p->world);
    ddl__put_u32(&w, p->epoch);
    ddl__put_bytes(&w, nonce, 32);
    return DDL_OK;
}

/* Begins as server. */
static ddl_status ddl__auth_server(ddl__auth *a, const ddl__auth_params *p, const uint8_t nonce[32]) {
    DDL__TRY(ddl__auth_start(a, p, DDL__AUTH_SERVER));
    ddl__writer w = ddl__writer_of(a->wire + 64, 48);
    ddl__auth_put_prefix(&w, 2, p->purpose);
    ddl__put_u32(&w, p->rank);
    ddl__put_u32(&w, p->epoch);
    ddl__put_bytes(&w, nonce, 32);
    return DDL_OK;
}

/* Lets a server turn down a peer that proves itself: call it between steps, before DDL_OK, when a->peer_rank is known
 * to be taken (DDL__AUTH_DUPLICATE). A stranger never hears of it. */
static void ddl__auth_refuse(ddl__auth *a, uint8_t code) { a->refusal = code; }

/* Forgets the keys and everything else. */
static void ddl__auth_wipe(ddl__auth *a) { ddl__wipe(a, sizeof(*a)); }

/* The first 8 bytes of either side. */
static void ddl__auth_read_prefix(ddl__auth *a, const uint8_t *p, uint8_t kind) {
    if (ddl__load_le32(p) != DDL__AUTH_MAGIC || p[6] != kind) {
        ddl__auth_fail(a, DDL_ERR_CORRUPT, DDL__AUTH_NOT_DDL);
        return;
    }
    a->peer_version = (uint16_t)(p[4] << 8 | p[5]);
    if (p[4] == DDL__WIRE_MAJOR) {
        return;
    }
    if (a->role == DDL__AUTH_CLIENT) {
        ddl__auth_fail(a, DDL_ERR_VERSION, DDL__AUTH_VERSION);
        return;
    }
    a->code = DDL__AUTH_VERSION;
    a->failure = DDL_ERR_VERSION; /* once the client has our 8 bytes */
    a->section = DDL__AUTH_S_CHALLENGE8;
    a->at = 64;
}

/* Server: takes HELLO as a claim, and proves itself whatever it says: a mistaken honest client then learns from VERDICT
 * what is wrong, a stranger learns nothing. */
static void ddl__auth_read_hello(ddl__auth *a) {
    ddl__reader r = ddl__reader_of(a->wire + 16, 16);
    a->peer_rank = ddl__get_u32(&r);
    (void)ddl__get_u32(&r); /* target: ddl__auth_judge looks */
    a->peer_world = ddl__get_u32(&r);
    a->peer_epoch = ddl__get_u32(&r);
    ddl__auth_mac(a, &a->secret, "ddl1 server", 112, a->wire + 112);
}

/* Client: the server's proof, then ours. */
static void ddl__auth_read_challenge(ddl__auth *a) {
    if (!ddl__auth_mac_ok(a, &a->secret, "ddl1 server", 112)) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PROOF);
        return;
    }
    a->peer_rank = ddl__load_le32(a->wire + 72);
    a->peer_epoch = ddl__load_le32(a->wire + 76);
    a->peer_world = a->world;
    if (a->wire[71] != a->purpose) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PURPOSE);
    } else if (a->peer != DDL__RANK_ANY && a->peer_rank != a->peer) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_RANK);
    } else {
        ddl__auth_mac(a, &a->secret, "ddl1 client", 144, a->wire + 144);
        ddl__auth_mac(a, &a->secret, "ddl1 key", 176, a->key);
    }
}

/* Server: what to tell a client that has proven itself. */
static uint8_t ddl__auth_judge(const ddl__auth *a) {
    uint32_t target = ddl__load_le32(a->wire + 20);
    int store = a->purpose == DDL__AUTH_STORE;
    if (a->wire[7] != a->purpose) {
        return DDL__AUTH_PURPOSE;
    }
    if (ddl__load_le64(a->wire + 8) != a->job) {
        return DDL__AUTH_JOB;
    }
    if (a->peer_world == 0 || (a->world != 0 && a->peer_world != a->world)) {
        return DDL__AUTH_WORLD;
    }
    if ((target != a->rank && !(store && target == DDL__RANK_ANY)) || (!store && a->peer_rank == a->rank) ||
        (a->peer_rank >= a->peer_world && !(store && a->peer_rank == DDL__RANK_ANY))) {
        return DDL__AUTH_RANK;
    }
    return a->refusal;
}

static ddl_status ddl__auth_code_status(uint8_t code) {
    return code == DDL__AUTH_OK ? DDL_OK : code == DDL__AUTH_VERSION ? DDL_ERR_VERSION : DDL_ERR_AUTH;
}

/* Server: a wrong proof is answered with silence, a right one with the verdict under the key that only it can know. */
static void ddl__auth_read_proof(ddl__auth *a) {
    ddl__hmac_key key;
    if (!ddl__auth_mac_ok(a, &a->secret, "ddl1 client", 144)) {
        ddl__auth_fail(a, DDL_ERR_AUTH, DDL__AUTH_PROOF);
        return;
    }
    ddl__auth_mac(a, &a->secret, "ddl1 key", 176, a->key);
    a->code = ddl__auth_judge(a);
    a->failure = ddl__auth_code_status(a->code);
    a->wire[176] = 4;
    a->wire[177] = a->code;
    ddl__hmac_key_init(&key, a->key, sizeof(a->key));
    ddl__auth_mac(a, &key, "ddl1 verdict", 180, a->wire + 180);
    ddl__wipe(&key, sizeof(key));
}

static void ddl__auth_read_verdict(ddl__auth *a) {
    ddl__hmac_key key;
    ddl__hmac_key_init(&key, a->key, sizeof(a->key));
    int proven = a->wire[176] == 4 && ddl__auth_mac_ok(a, &key, "ddl1 verdict", 180);
    ddl__wipe(&key, sizeof(key));
    a->code = proven ? a->wire[177] : DDL__AUTH_PROOF;
    a->status = ddl__auth_code_status(a->code);
}

/* A section has arrived in full. */
static void ddl__auth_received(ddl__auth *a, unsigned section) {
    switch (section) {
    case DDL__AUTH_S_HELLO8:
        ddl__auth_read_prefix(a, a->wire, 1);
        break;
    case DDL__AUTH_S_HELLO:
        ddl__auth_read_hello(a);
        break;
    case DDL__AUTH_S_CHALLENGE8:
        ddl__auth_read_prefix(a, a->wire + 64, 2);
        break;
    case DDL__AUTH_S_CHALLENGE:
        ddl__auth_read_challenge(a);
        break;
    case DDL__AUTH_S_PROOF:
        ddl__auth_read_proof(a);
        break;
    default:
        ddl__auth_read_verdict(a);
        break;
    }
}

/* Moves the handshake on with what has arrived, in pieces of any size, and gives what is to be sent; in_bytes may be 0.
 * Takes no byte that follows the handshake: *out_used <= in_bytes says where frames begin. out_cap of DDL__AUTH_MAX_OUT
 * is always enough; with less, call again. What it wrote is to be sent also when it returns an error.
 * DDL_IN_PROGRESS: needs more. DDL_OK: both are proven. Errors, for good: DDL_ERR_AUTH, DDL_ERR_VERSION,
 * DDL_ERR_CORRUPT (no handshake at all), DDL_ERR_ARG (never begun, or wiped). */
static ddl_status ddl__auth_step(ddl__auth *a, const uint8_t *in, size_t in_bytes, size_t *out_used, uint8_t *out,
                                 size_t out_cap, size_t *out_bytes) {
    static const uint8_t ends[] = {8, 64, 72, 144, 176, DDL__AUTH_BYTES};
    static const uint8_t senders[] = {DDL__AUTH_CLIENT, DDL__AUTH_CLIENT, DDL__AUTH_SERVER,
                                      DDL__AUTH_SERVER, DDL__AUTH_CLIENT, DDL__AUTH_SERVER};
    *out_used = *out_bytes = 0;
    if (a->role == 0) {
        return DDL_ERR_ARG; /* all zero would read as DDL_OK */
    }
    while (a->status == DDL_IN_PROGRESS) {
        unsigned section = a->section;
        int mine = senders[section] == a->role;
        size_t have = mine ? out_cap - *out_bytes : in_bytes - *out_used, need = (size_t)(ends[section] - a->at);
        size_t n = have < need ? have : need;
        if (n > 0 && mine) {
            memcpy(out + *out_bytes, a->wire + a->at, n);
            *out_bytes += n;
        } else if (n > 0) {
            memcpy(a->wire + a->at, in + *out_used, n);
            *out_used += n;
        }
        a->at = (uint16_t)(a->at + n);
        if (n < need) {
            return DDL_IN_PROGRESS;
        }
        a->section++;
        if (!mine) {
            ddl__auth_received(a, section);
        } else if (section == DDL__AUTH_S_VERDICT || a->failure != DDL_OK) {
            a->status = a->failure;
        }
    }
    return a->status;
}

/* >>settings/machine */
/* machine: what this process has been given to run on: cores, file descriptors, and the host's identity.
 * It must not know of ranks. */

/* Reads a small text file, at most cap - 1 bytes of it, and ends it with a 0. Returns its bytes, or -1. Files of /proc
 * give no size beforehand. */
static ssize_t ddl__read_text(const char *path, char *out, size_t cap) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    size_t used = 0;
    while (used < cap - 1) {
        ssize_t n = read(fd, out + used, cap - 1 - used);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        used += (size_t)n;
    }
    close(fd);
    out[used] = 0;
    return (ssize_t)used;
}

/* What /proc/PID/stat tells: `pid (name) state parent ...`. The name may contain anything, parentheses too. */
typedef struct ddl__process {
    const char *name; /* in the text */
    char state;       /* Z, X: it is dead, its parent only has not asked */
    long parent;
    uint64_t start; /* field 22: when it began, in ticks since the boot */
} ddl__process;

/* False: the text is cut or is something else. Ends the name with a 0 inside the text. */
static bool ddl__process_parse(char *text, ddl__process *out) {
    char *name = strchr(text, '('), *end = strrchr(text, ')');
    if (name == NULL || end == NULL || end < name || end[1] != ' ' || end[2] == 0) {
        return false;
    }
    *end = 0;
    out->name = name + 1;
    out->state = end[2];
    const char *at = strchr(end + 2, ' ');
    out->parent = at != NULL ? strtol(at, NULL, 10) : 0;
    for (int field = 4; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    out->start = at != NULL ? strtoull(at, NULL, 10) : 0;
    return at != NULL;
}

/* A quota as cores, rounded up; INT32_MAX when it is none: `max`, or -1. */
static int32_t ddl__quota_parse(const char *quota_text, const char *period_text) {
    long long quota = strtoll(quota_text, NULL, 10), period = strtoll(period_text, NULL, 10);
    if (quota <= 0 || period <= 0 || (quota - 1) / period >= INT32_MAX) {
        return INT32_MAX;
    }
    return (int32_t)((quota - 1) / period + 1);
}

/* The quota of one control group: `100000 100000` in cpu.max, two files in version 1. */
static int32_t ddl__quota_of(const char *folder) {
    char path[4300], quota[64], period[64];
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (ddl__read_text(path, quota, sizeof quota) > 0) {
        return ddl__quota_parse(quota, quota + strcspn(quota, " "));
    }
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (ddl__read_text(path, quota, sizeof quota) < 0) {
        return INT32_MAX;
    }
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    return ddl__read_text(path, period, sizeof period) < 0 ? INT32_MAX : ddl__quota_parse(quota, period);
}

/* The path of this process in a hierarchy of /proc/self/cgroup: a line `0::/a/b`, or `3:cpu,cpuacct:/a/b` in version 1.
 * Inside a container it is often "/" while the quota stands at the root of what is mounted. */
static bool ddl__cgroup_path(const char *list, const char *controller, char *out, size_t cap) {
    for (const char *line = list; line != NULL && *line != 0;) {
        const char *end = strchr(line, '\n'), *first = strchr(line, ':');
        const char *second = first != NULL ? strchr(first + 1, ':') : NULL;
        if (second == NULL || (end != NULL && second > end)) {
            return false;
        }
        size_t names = (size_t)(second - first - 1);
        char field[128];
        snprintf(field, sizeof field, ",%.*s,", (int)DDL__MIN(names, sizeof field - 3), first + 1);
        if (strstr(field, controller) != NULL) {
            size_t bytes = end != NULL ? (size_t)(end - second - 1) : strlen(second + 1);
            snprintf(out, cap, "%.*s", (int)DDL__MIN(bytes, cap - 1), second + 1);
            return true;
        }
        line = end != NULL ? end + 1 : NULL;
    }
    return false;
}

/* Every group above counts as well: the tightest quota wins. */
static int32_t ddl__cgroup_cores(void) {
    static const char *const roots[2] = {"/sys/fs/cgroup", "/sys/fs/cgroup/cpu"};
    static const char *const controllers[2] = {",,", ",cpu,"};
    char list[4096], path[2048], folder[4096];
    int32_t cores = INT32_MAX;
    if (ddl__read_text("/proc/self/cgroup", list, sizeof list) < 0) {
        list[0] = 0;
    }
    for (int version = 0; version < 2; version++) {
        if (!ddl__cgroup_path(list, controllers[version], path, sizeof path)) {
            path[0] = 0;
        }
        for (;;) {
            snprintf(folder, sizeof folder, "%s%s", roots[version], path);
            cores = DDL__MIN(cores, ddl__quota_of(folder));
            char *slash = strrchr(path, '/');
            if (slash == NULL) {
                break;
            }
            *slash = 0;
        }
    }
    return cores;
}

/* Cores that this process may use: its affinity mask, and the quota of its control group. At least 1. */
static int32_t ddl__cores(void) {
    int32_t cores = 0;
    for (size_t most = 1024; most <= 1u << 17 && cores == 0;
         most *= 4) { /* EINVAL: the kernel has more than the mask */
        cpu_set_t *set = CPU_ALLOC(most);
        if (set == NULL) {
            break;
        }
        size_t bytes = CPU_ALLOC_SIZE(most);
        if (sched_getaffinity(0, bytes, set) == 0) {
            cores = CPU_COUNT_S(bytes, set);
        }
        CPU_FREE(set);
    }
    if (cores == 0) {
        cores = (int32_t)DDL__MAX(sysconf(_SC_NPROCESSORS_ONLN), 1);
    }
    return DDL__MIN(cores, ddl__cgroup_cores());
}

/* Descriptors in use now. Without /proc a guess that is on the safe side. */
static int32_t ddl__open_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL) {
        return 64;
    }
    int32_t count = -3; /* ".", ".." and the folder itself */
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return DDL__MAX(count, 0);
}

/* Makes room for `more` file descriptors above those in use: raises the soft limit as far as it needs, so that a job
 * too large for its limits fails at its start and not at its first checkpoint. Not higher: select() in the program
 * breaks above 1024. */
static ddl_status ddl__need_fds(int32_t more, ddl__sentence *why) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return DDL_OK; /* a sandbox that does not tell; it will show */
    }
    rlim_t used = (rlim_t)ddl__open_fds(), need = used + (rlim_t)more;
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= need) {
        return DDL_OK;
    }
    unsigned long long hard = (unsigned long long)limit.rlim_max, soft = (unsigned long long)limit.rlim_cur;
    if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= need) {
        limit.rlim_cur = need;
        if (setrlimit(RLIMIT_NOFILE, &limit) == 0) {
            return DDL_OK;
        }
    }
    return ddl__fail(why, DDL_ERR_SYSTEM,
                     "ddl_init: this job needs %d file descriptors besides the %llu in use, but the limit is %llu and "
                     "cannot be raised above %llu. Raise it where the job is started: ulimit -n %llu, LimitNOFILE= of "
                     "systemd, --ulimit nofile= of a container",
                     more, (unsigned long long)used, soft, hard, (unsigned long long)need);
}

/* Equal on two processes when they share a host: same boot of the same kernel, and same network namespace. A container
 * with its own network counts as its own host: unix sockets and loopback do not lead out of it. */
static void ddl__host_id(char *out, size_t cap) {
    char boot[80];
    struct stat space;
    ssize_t n = ddl__read_text("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    if (n > 0) {
        boot[strcspn(boot, "\n")] = 0;
    } else if (gethostname(boot, sizeof boot) != 0) {
        snprintf(boot, sizeof boot, "unknown");
    }
    boot[sizeof boot - 1] = 0;
    uint64_t network = stat("/proc/self/ns/net", &space) == 0 ? (uint64_t)space.st_ino : 0;
    snprintf(out, cap, "%s/%" PRIu64, boot, network);
}

/* >>settings/table */
/* table: every DDL_ variable that the core reads, with its default and a line of help, and the parsing of values.
 * A variable that is not in the table is not read, so that the list cannot go stale. */

typedef struct ddl__setting_row {
    const char *name, *standard, *help;
} ddl__setting_row;

static const ddl__setting_row ddl__setting_table[] = {
    {"DDL_LOG", "warn", "what to log: none, warn, info or debug"},
    {"DDL_SECRET_FD", "", "a descriptor to read the job secret from; ddlrun sets it"},
    {"DDL_SECRET_FILE", "", "a file with the job secret (at least 16 bytes), readable by its owner alone"},
    {"DDL_SECRET", "", "the job secret itself, at least 16 bytes"},
    {"DDL_JOB", "", "a name that tells jobs on one host, port or folder apart"},
    {"DDL_RENDEZVOUS", "", "tcp://host:port or file:///shared/folder, instead of MASTER_ADDR and MASTER_PORT"},
    {"DDL_INTERFACE", "", "the network interface to bind and to advertise"},
    {"DDL_ADVERTISE", "", "an address that peers reach this rank at, when it is not the bound one"},
    {"DDL_PORT_RANGE", "", "ports that ranks listen on, as 20000-20100; any free port without it"},
    {"DDL_TRANSPORTS", "", "transports in order of preference, as shm,tcp; all that load without it"},
    {"DDL_PLUGINS", "", "plugins that must load: names or absolute paths, separated by commas"},
    {"DDL_PLUGIN_PATH", "", "folders to find plugins in, separated by colons"},
    {"DDL_SELF_TEST", "1", "0: transports of plugins are used without having been tried out"},
    {"DDL_ALGO", "auto", "algorithms, as ring or all_reduce=ring,broadcast=tree"},
    {"DDL_TUNE_CACHE", "", "a file that keeps the measured latency and bandwidth for later runs of the same shape"},
    {"DDL_TIMEOUT_MS", "300000", "deadline of an operation; -1: none"},
    {"DDL_INIT_TIMEOUT_MS", "60000", "deadline of ddl_init"},
    {"DDL_STALL_MS", "10000", "a wait this long is reported; -1: never"},
    {"DDL_PROGRESS_THREAD", "0", "1: operations progress on a thread of their own"},
    {"DDL_DETERMINISTIC", "0", "1: reduce in rank order whatever the algorithm and transport"},
    {"DDL_SPREAD", "1", "0: ranks that wait on one core stay there while another core is free"},
    {"DDL_HOST_ID", "", "ranks with equal text count as on one host; for tests"},
    {"DDL_CHECK", "", "payload: checksums of all data, not only of headers"},
};

/* The value of a variable, NULL when it is unset or empty (`RANK= ./train` unsets it). For launchers' variables. */
static const char *ddl__env(const char *name) {
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* The same for a row of the table; NULL when there is no such row. */
static const char *ddl__setting_env(const char *name) {
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        if (strcmp(ddl__setting_table[i].name, name) == 0) {
            return ddl__env(name);
        }
    }
    return NULL;
}

/* The whole text is a decimal number from min to max. strtoll alone would take " +7x". */
static bool ddl__parse_int(const char *text, int64_t min, int64_t max, int64_t *out) {
    if (!((text[0] >= '0' && text[0] <= '9') || (text[0] == '-' && text[1] >= '0' && text[1] <= '9'))) {
        return false;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (*end != 0 || errno == ERANGE || value < min || value > max) {
        return false;
    }
    *out = value;
    return true;
}

/* A number of the environment. *out stays as it is when the variable is unset. */
static ddl_status ddl__env_int(const char *name, int64_t min, int64_t max, int64_t *out, ddl__sentence *why) {
    const char *text = ddl__env(name);
    if (text == NULL || ddl__parse_int(text, min, max, out)) {
        return DDL_OK;
    }
    return ddl__fail(why, DDL_ERR_CONFIG,
                     "ddl_init: %s is \"%.60s\", which is not a whole number from %lld to %lld. Correct or unset it",
                     name, text, (long long)min, (long long)max);
}

#define DDL__MS_MAX (1000ll * 3600 * 24 * 366) /* a year: deadlines never overflow */

/* 1 to max; and -1, where none is possible. */
static bool ddl__in_range(int64_t value, bool none, int64_t max) {
    return value <= max && (value > 0 || (value == -1 && none));
}

/* A number that the config gives (not 0), else the environment, else *out as it is. none: -1 is allowed. */
static ddl_status ddl__pick_int(int64_t given, const char *member, const char *name, bool none, int64_t max,
                                int64_t *out, ddl__sentence *why) {
    int64_t value = given;
    if (given == 0) {
        const char *text = ddl__setting_env(name);
        if (text == NULL) {
            return DDL_OK;
        }
        if (!ddl__parse_int(text, -1, max, &value) || !ddl__in_range(value, none, max)) {
            return ddl__fail(
                why, DDL_ERR_CONFIG,
                "ddl_init: %s is \"%.60s\", which is not a whole number from 1 to %lld%s. Correct or unset it", name,
                text, (long long)max, none ? ", or -1 for none" : "");
        }
    }
    if (!ddl__in_range(value, none, max)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s of ddl_config is %lld; 1 to %lld%s is possible, 0 takes %s",
                         member, (long long)value, (long long)max, none ? " or -1 for none" : "", name);
    }
    *out = value;
    return DDL_OK;
}

/* 0 or 1: on when the config says so, else by the environment, else *out as it is. */
static ddl_status ddl__pick_switch(int32_t given, const char *member, const char *name, bool *out, ddl__sentence *why) {
    const char *text = ddl__setting_env(name);
    int64_t value = given == 1 || *out;
    if (given != 0 && given != 1) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s of ddl_config is %d; 0 or 1 is possible", member, given);
    }
    if (given == 0 && text != NULL && !ddl__parse_int(text, 0, 1, &value)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s is \"%.60s\"; 0 or 1 is possible", name, text);
    }
    *out = value == 1;
    return DDL_OK;
}

/* A text that the config gives, else the environment: copied into *out, NULL when neither has it. */
static ddl_status ddl__pick_text(ddl__base *base, const char *given, const char *name, char **out, ddl__sentence *why) {
    const char *text = given != NULL && given[0] != 0 ? given : ddl__setting_env(name);
    if (text == NULL) {
        return DDL_OK;
    }
    *out = ddl__copy_string(base, text);
    return *out != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the value of %s", name);
}

static ddl_status ddl__parse_log_level(ddl_log_level given, ddl_log_level *out, ddl__sentence *why) {
    static const char *const names[] = {"none", "warn", "info", "debug"};
    const char *text = ddl__setting_env("DDL_LOG");
    *out = given != DDL_LOG_NONE ? given : DDL_LOG_WARN;
    if (given != DDL_LOG_NONE || text == NULL) {
        return (int)given >= 0 && given <= DDL_LOG_DEBUG
                   ? DDL_OK
                   : ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: log_level of ddl_config is %d; 0 to 3 is possible",
                               (int)given);
    }
    for (int level = 0; level <= DDL_LOG_DEBUG; level++) {
        if (strcmp(text, names[level]) == 0 || (text[0] == '0' + level && text[1] == 0)) {
            *out = (ddl_log_level)level;
            return DDL_OK;
        }
    }
    return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_LOG is \"%.60s\"; none, warn, info and debug are possible",
                     text);
}

/* "20000-20100" or "20000". */
static ddl_status ddl__parse_port_range(const char *text, int32_t *out_first, int32_t *out_last, ddl__sentence *why) {
    char low[8] = "", high[8] = "";
    int64_t first = 0, last = 0;
    int used = 0, fields = sscanf(text, "%7[0-9]-%7[0-9]%n", low, high, &used);
    bool whole = fields == 2 ? text[used] == 0 : strlen(low) == strlen(text);
    if (!whole || !ddl__parse_int(low, 1, 65535, &first) ||
        !ddl__parse_int(fields == 2 ? high : low, first, 65535, &last)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the port range is \"%.60s\"; two ports from 1 to 65535 are possible, as 20000-20100", text);
    }
    *out_first = (int32_t)first;
    *out_last = (int32_t)last;
    return DDL_OK;
}

/* >>settings/launch */
/* launch: which rank of how many this process is, by the variables of whoever started it, and where rank 0 is. */

#define DDL__WORLD_MAX 1048576

typedef struct ddl__launch {
    const char *by; /* for messages: "Open MPI" */
    int32_t rank, world;
    int32_t local_rank, local_world; /* -1: not told */
} ddl__launch;

/* In the order they are asked. The first of which a rank or a world is set decides: srun and mpirun often start
 * torchrun, whose ranks then carry both. world_too: another name of the same thing. */
typedef struct ddl__launcher {
    const char *by, *rank, *world, *world_too, *local_rank, *local_world;
} ddl__launcher;

static const ddl__launcher ddl__launchers[] = {
    {"RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", NULL, "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", NULL, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", NULL},
};

/* A batch script of Slurm carries SLURM_PROCID=0 and SLURM_NTASKS too, though it is no task: only a step has a node
 * list of its own. A plain ./train in a script is a world of one. */
static bool ddl__launcher_present(const ddl__launcher *l) {
    if (strcmp(l->by, "Slurm") == 0 && ddl__env("SLURM_STEP_NODELIST") == NULL) {
        return false;
    }
    return ddl__env(l->rank) != NULL || ddl__env(l->world) != NULL ||
           (l->world_too != NULL && ddl__env(l->world_too) != NULL);
}

static ddl_status ddl__launch_check(const ddl__launch *l, const char *rank_name, const char *world_name,
                                    ddl__sentence *why) {
    if (l->rank >= l->world) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %s is %d and %s is %d, but ranks go from 0 to %d. Correct the launcher or its variables",
            rank_name, l->rank, world_name, l->world, l->world - 1);
    }
    if (l->local_world > l->world || (l->local_world > 0 && l->local_rank >= l->local_world)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: this process is rank %d of %d, but %d of %d on its host (%s): these contradict each other",
            l->rank, l->world, l->local_rank, l->local_world, l->by);
    }
    return DDL_OK;
}

static ddl_status ddl__launch_from(const ddl__launcher *l, ddl__launch *out, ddl__sentence *why) {
    const char *world_name = l->world_too != NULL && ddl__env(l->world) == NULL ? l->world_too : l->world;
    const char *set = ddl__env(l->rank) != NULL ? l->rank : world_name, *unset = set == l->rank ? world_name : l->rank;
    if (ddl__env(unset) == NULL) {
        return ddl__fail(why, DDL_ERR_CONFIG,
                         "ddl_init: %s is \"%.60s\", but %s is not set: it takes both, or neither for a world of one",
                         set, ddl__env(set), unset);
    }
    int64_t rank = 0, world = 1, local_rank = -1, local_world = -1;
    DDL__TRY(ddl__env_int(world_name, 1, DDL__WORLD_MAX, &world, why));
    DDL__TRY(ddl__env_int(l->rank, 0, DDL__WORLD_MAX - 1, &rank, why));
    DDL__TRY(ddl__env_int(l->local_rank, 0, DDL__WORLD_MAX - 1, &local_rank, why));
    if (l->local_world != NULL) {
        DDL__TRY(ddl__env_int(l->local_world, 1, DDL__WORLD_MAX, &local_world, why));
    }
    const char *nodes = strcmp(l->by, "Slurm") == 0 ? ddl__env("SLURM_STEP_NUM_NODES") : NULL;
    if (nodes != NULL && strcmp(nodes, "1") == 0) {
        local_world = world;
    }
    *out = (ddl__launch){l->by, (int32_t)rank, (int32_t)world, (int32_t)local_rank, (int32_t)local_world};
    return ddl__launch_check(out, l->rank, world_name, why);
}

static ddl_status ddl__launch_from_config(const ddl_config *config, ddl__launch *out, ddl__sentence *why) {
    if (config->world_size < 0 || config->world_size > DDL__WORLD_MAX || config->rank < 0 ||
        config->rank >= config->world_size) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: rank %d of world_size %d in ddl_config is not possible; ranks go from 0 to world_size "
            "- 1, at most %d ranks, and both 0 takes them from the environment",
            config->rank, config->world_size, DDL__WORLD_MAX);
    }
    *out = (ddl__launch){"ddl_config", config->rank, config->world_size, -1, -1};
    return DDL_OK;
}

static ddl_status ddl__launch_find(const ddl_config *config, ddl__launch *out, ddl__sentence *why) {
    if (config->world_size != 0 || config->rank != 0) {
        return ddl__launch_from_config(config, out, why);
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__launchers); i++) {
        if (ddl__launcher_present(&ddl__launchers[i])) {
            return ddl__launch_from(&ddl__launchers[i], out, why);
        }
    }
    *out = (ddl__launch){"nobody", 0, 1, 0, 1};
    return DDL_OK;
}

/* The process id of the ancestor with a program's name, 0 when there is none. */
static long ddl__ancestor(const char *program) {
    long pid = (long)getppid();
    for (int depth = 0; depth < 64 && pid > 1; depth++) {
        char path[64], text[1024];
        ddl__process process;
        snprintf(path, sizeof path, "/proc/%ld/stat", pid);
        if (ddl__read_text(path, text, sizeof text) <= 0 || !ddl__process_parse(text, &process)) {
            return 0;
        }
        if (strcmp(process.name, program) == 0) {
            return pid;
        }
        pid = process.parent;
    }
    return 0;
}

/* What the launcher calls this job, the same on all of its ranks and on no other's. False: it does not tell. MPICH's
 * mpirun has no name for it, but all its ranks on a host have one ancestor. */
static bool ddl__launch_job(const ddl__launch *launch, char *out, size_t cap) {
    const char *run = ddl__env("TORCHELASTIC_RUN_ID"), *mpi = ddl__env("PMIX_NAMESPACE");
    const char *slurm = ddl__env("SLURM_JOB_ID"), *step = ddl__env("SLURM_STEP_ID");
    if (run != NULL) {
        snprintf(out, cap, "%s", run);
    } else if (strcmp(launch->by, "Open MPI") == 0 && mpi != NULL) {
        snprintf(out, cap, "mpi-%s", mpi);
    } else if (strcmp(launch->by, "Slurm") == 0 && slurm != NULL) {
        snprintf(out, cap, "slurm-%s.%s", slurm, step != NULL ? step : "0");
    } else if (strcmp(launch->by, "PMI") == 0 && launch->local_world == launch->world) {
        long proxy = ddl__ancestor("hydra_pmi_proxy");
        snprintf(out, cap, "hydra-%ld", proxy);
        return proxy != 0;
    } else {
        return false;
    }
    return true;
}

/* Where the ranks meet. */
enum ddl__meeting { DDL__MEET_ALONE, DDL__MEET_EXCHANGE, DDL__MEET_TCP, DDL__MEET_FILE };

typedef struct ddl__meeting_place {
    int kind;         /* enum ddl__meeting */
    char *host;       /* TCP: a name or an address, without brackets */
    int32_t port;     /* TCP: the first port to try; 0: all ranks are here, on a unix socket named after the job */
    int32_t ports;    /* how many in a row; 1 but for torchrun */
    char *folder;     /* FILE */
    const char *from; /* for messages: "MASTER_ADDR and MASTER_PORT" */
} ddl__meeting_place;

/* The first host of Slurm's list: "node[03-07,9],x1" is node03. */
static void ddl__first_host(const char *list, char *out, size_t cap) {
    size_t head = strcspn(list, "[,"), number = 0;
    const char *inside = list + head, *tail = "";
    if (*inside == '[') {
        inside++;
        number = strcspn(inside, "-,]");
        tail = strchr(inside, ']');
        tail = tail != NULL ? tail + 1 : "";
    }
    snprintf(out, cap, "%.*s%.*s%.*s", (int)head, list, (int)number, inside, (int)strcspn(tail, ",["), tail);
}

static ddl_status ddl__place_set_tcp(ddl__base *base, const char *host, size_t host_bytes, const char *port,
                                     const char *port_name, ddl__meeting_place *out, ddl__sentence *why) {
    int64_t number = 0;
    if (!ddl__parse_int(port, 1, 65535, &number)) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the port of %s is \"%.60s\", which is not a whole number from 1 to 65535. All ranks "
            "need the same free port of rank 0's machine",
            port_name, port);
    }
    if (host_bytes >= 2 && host[0] == '[' && host[host_bytes - 1] == ']') { /* an IPv6 address in a URL */
        host++;
        host_bytes -= 2;
    }
    if (host_bytes == 0 || host_bytes > 255) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %s gives no host name where rank 0 runs", port_name);
    }
    out->host = ddl__alloc(base, host_bytes + 1);
    if (out->host == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the name of rank 0's host");
    }
    memcpy(out->host, host, host_bytes);
    out->kind = DDL__MEET_TCP;
    out->port = (int32_t)number;
    out->ports = 1;
    return DDL_OK;
}

static ddl_status ddl__place_from_url(ddl__base *base, const char *url, const char *from, ddl__meeting_place *out,
                                      ddl__sentence *why) {
    out->from = from;
    if (strncmp(url, "tcp://", 6) == 0) {
        const char *host = url + 6, *colon = strrchr(host, ':');
        if (colon != NULL) {
            return ddl__place_set_tcp(base, host, (size_t)(colon - host), colon + 1, from, out, why);
        }
    } else if (strncmp(url, "file:///", 8) == 0) {
        out->kind = DDL__MEET_FILE;
        out->folder = ddl__copy_string(base, url + 7);
        return out->folder != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for a path");
    }
    return ddl__fail(why, DDL_ERR_CONFIG,
                     "ddl_init: %s is \"%.200s\"; tcp://host:port and file:///absolute/folder are possible", from, url);
}

/* The agent of torchrun listens on MASTER_PORT itself and says so; rank 0 then takes one of the ports that follow, and
 * the others find out which by the handshake. */
static void ddl__place_beside_agent(ddl__meeting_place *place) {
    const char *agent = ddl__env("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcmp(agent, "True") == 0) {
        place->port = place->port < 65527 ? place->port + 1 : 65520;
        place->ports = 8;
    }
}

/* mpirun and srun set no MASTER_ADDR. When they say that all ranks are on this host, none is needed. */
static ddl_status ddl__place_from_master(ddl__base *base, const ddl__launch *launch, bool job_known,
                                         ddl__meeting_place *out, ddl__sentence *why) {
    const char *host = ddl__env("MASTER_ADDR"), *port = ddl__env("MASTER_PORT"),
               *list = ddl__env("SLURM_STEP_NODELIST");
    char first[256];
    if (host == NULL && port == NULL && job_known && launch->local_world == launch->world) {
        out->kind = DDL__MEET_TCP;
        out->host = ddl__copy_string(base, "127.0.0.1");
        out->ports = 1;
        out->from = launch->by;
        return out->host != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for an address");
    }
    if (host == NULL && list != NULL && strcmp(launch->by, "Slurm") == 0) {
        ddl__first_host(list, first, sizeof first);
        host = first;
    }
    if (host == NULL || port == NULL) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: this process is rank %d of %d (by %s), but %s is not set, so the ranks cannot find each "
            "other. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks "
            "(mpirun -x, srun --export), or DDL_RENDEZVOUS=file:///shared/folder",
            launch->rank, launch->world, launch->by,
            host != NULL   ? "MASTER_PORT"
            : port != NULL ? "MASTER_ADDR"
                           : "MASTER_ADDR or MASTER_PORT");
    }
    out->from = "MASTER_ADDR and MASTER_PORT";
    DDL__TRY(ddl__place_set_tcp(base, host, strlen(host), port, "MASTER_PORT", out, why));
    ddl__place_beside_agent(out);
    return DDL_OK;
}

static ddl_status ddl__place_find(ddl__base *base, const ddl_config *config, const ddl__launch *launch, bool job_known,
                                  ddl__meeting_place *out, ddl__sentence *why) {
    const char *url = ddl__setting_env("DDL_RENDEZVOUS");
    if (config->exchange != NULL) {
        out->kind = DDL__MEET_EXCHANGE;
        return DDL_OK;
    }
    if (config->rendezvous != NULL && config->rendezvous[0] != 0) {
        return ddl__place_from_url(base, config->rendezvous, "rendezvous of ddl_config", out, why);
    }
    if (url != NULL) {
        return ddl__place_from_url(base, url, "DDL_RENDEZVOUS", out, why);
    }
    return launch->world > 1 ? ddl__place_from_master(base, launch, job_known, out, why) : DDL_OK;
}

/* >>settings/secret */
/* secret: where the job secret comes from. It is held in one block, wiped when that is freed, and appears in no log
 * line and no sentence. Order: the program, an inherited descriptor, a file, a variable. */

#define DDL__SECRET_MIN 16
#define DDL__SECRET_MAX 4096

typedef struct ddl__secret {
    uint8_t *bytes; /* NULL: the job has none */
    size_t count;
    const char *source; /* for messages: "DDL_SECRET_FILE" */
} ddl__secret;

static void ddl__secret_free(ddl__base *base, ddl__secret *secret) {
    if (secret->bytes != NULL) {
        ddl__wipe(secret->bytes, secret->count);
        ddl__free(base, secret->bytes);
    }
    memset(secret, 0, sizeof *secret);
}

static ddl_status ddl__secret_set(ddl__base *base, const char *source, const void *bytes, size_t count,
                                  ddl__secret *out, ddl__sentence *why) {
    if (count < DDL__SECRET_MIN || count > DDL__SECRET_MAX) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: the secret of %s has %zu bytes; %d to %d are possible. Make one: head -c 32 /dev/urandom",
            source, count, DDL__SECRET_MIN, DDL__SECRET_MAX);
    }
    out->bytes = ddl__alloc(base, count);
    if (out->bytes == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the secret");
    }
    memcpy(out->bytes, bytes, count);
    out->count = count;
    out->source = source;
    return DDL_OK;
}

/* Reads to the end, from byte 0 where the descriptor can seek: the ranks of one launcher share one file offset.
 * Returns the bytes, or -1. One byte more than allowed is read, so that too long shows. */
static ssize_t ddl__secret_read(int fd, bool seekable, uint8_t out[DDL__SECRET_MAX + 1]) {
    size_t used = 0;
    while (used < DDL__SECRET_MAX + 1) {
        size_t room = DDL__SECRET_MAX + 1 - used;
        ssize_t n = seekable ? pread(fd, out + used, room, (off_t)used) : read(fd, out + used, room);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -1;
        }
        if (n == 0) {
            break;
        }
        used += (size_t)n;
    }
    return (ssize_t)used;
}

/* A pipe is read once and closed. A file (ddlrun gives a sealed memfd) stays open for a later ddl_init of the same
 * process, hidden from programs that this one executes. */
static ddl_status ddl__secret_from_fd(ddl__base *base, const char *text, ddl__secret *out, ddl__sentence *why) {
    int64_t fd;
    struct stat info;
    uint8_t bytes[DDL__SECRET_MAX + 1];
    if (!ddl__parse_int(text, 0, INT32_MAX, &fd)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_SECRET_FD is \"%.60s\", which is no descriptor's number",
                         text);
    }
    if (fstat((int)fd, &info) != 0) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: DDL_SECRET_FD is %d, but no such descriptor is open: the launcher must leave it open "
            "for its ranks, and from a pipe it can be read only once",
            (int)fd);
    }
    bool file = S_ISREG(info.st_mode);
    ssize_t n = ddl__secret_read((int)fd, file, bytes);
    int error = errno;
    if (file) {
        (void)fcntl((int)fd, F_SETFD, FD_CLOEXEC);
    } else {
        close((int)fd);
    }
    ddl_status status = n < 0
                            ? ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot read descriptor %d of DDL_SECRET_FD: %s",
                                        (int)fd, strerror(error))
                            : ddl__secret_set(base, "DDL_SECRET_FD", bytes, (size_t)n, out, why);
    ddl__wipe(bytes, sizeof bytes);
    return status;
}

/* Looks at the open file, not at the path, which may change in between. A link is fine: Kubernetes mounts them so. */
static ddl_status ddl__secret_check_file(int fd, const char *path, ddl__sentence *why) {
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: %.400s of DDL_SECRET_FILE is not a file", path);
    }
    if (info.st_uid != geteuid()) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %.400s of DDL_SECRET_FILE belongs to user %ld, this process to user %ld: a secret that "
            "others can change proves nothing",
            path, (long)info.st_uid, (long)geteuid());
    }
    if ((info.st_mode & 077) != 0) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: %.400s of DDL_SECRET_FILE has mode %03o, so others may read or change it: chmod 600 it", path,
            (unsigned)(info.st_mode & 0777));
    }
    return DDL_OK;
}

/* One newline at the end is the editor's, not the secret's. O_NONBLOCK: a pipe in its place must not block us. */
static ddl_status ddl__secret_from_file(ddl__base *base, const char *path, ddl__secret *out, ddl__sentence *why) {
    uint8_t bytes[DDL__SECRET_MAX + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot open %.400s of DDL_SECRET_FILE: %s", path,
                         strerror(errno));
    }
    ddl_status status = ddl__secret_check_file(fd, path, why);
    ssize_t n = status == DDL_OK ? ddl__secret_read(fd, true, bytes) : 0;
    if (n < 0) {
        status = ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: cannot read %.400s of DDL_SECRET_FILE: %s", path,
                           strerror(errno));
    }
    close(fd);
    if (status == DDL_OK) {
        n -= n > 0 && bytes[n - 1] == '\n';
        status = ddl__secret_set(base, "DDL_SECRET_FILE", bytes, (size_t)n, out, why);
    }
    ddl__wipe(bytes, sizeof bytes);
    return status;
}

static ddl_status ddl__secret_find(ddl__base *base, const ddl_config *config, ddl__secret *out, ddl__sentence *why) {
    if (config->secret != NULL || config->secret_bytes > 0) {
        return ddl__secret_set(base, "ddl_config", config->secret, config->secret != NULL ? config->secret_bytes : 0,
                               out, why);
    }
    const char *fd = ddl__setting_env("DDL_SECRET_FD"), *file = ddl__setting_env("DDL_SECRET_FILE");
    const char *text = ddl__setting_env("DDL_SECRET");
    if (fd != NULL) {
        return ddl__secret_from_fd(base, fd, out, why);
    }
    if (file != NULL) {
        return ddl__secret_from_file(base, file, out, why);
    }
    return text != NULL ? ddl__secret_set(base, "DDL_SECRET", text, strlen(text), out, why) : DDL_OK;
}

/* >>settings/unknown */
/* unknown: DDL_ variables that nobody reads, and which one may have been meant. A misspelt setting that is silently
 * ignored costs an afternoon. Values are not looked at: one may be a secret. */

enum { DDL__NAME_MAX = 64 };

/* Insertions, deletions and changes of a letter that lead from one name to the other (Levenshtein, by rows). */
static int32_t ddl__name_distance(const char *a, size_t a_length, const char *b) {
    int32_t row[DDL__NAME_MAX + 1];
    size_t b_length = strlen(b);
    if (a_length > DDL__NAME_MAX || b_length > DDL__NAME_MAX) {
        return DDL__NAME_MAX;
    }
    for (size_t j = 0; j <= b_length; j++) {
        row[j] = (int32_t)j;
    }
    for (size_t i = 0; i < a_length; i++) {
        int32_t corner = row[0];
        row[0] = (int32_t)i + 1;
        for (size_t j = 0; j < b_length; j++) {
            int32_t changed = corner + (a[i] != b[j]), moved = DDL__MIN(row[j], row[j + 1]) + 1;
            corner = row[j + 1];
            row[j + 1] = DDL__MIN(changed, moved);
        }
    }
    return row[b_length];
}

/* The setting that a name of that length is nearest to; NULL when none is near. */
static const char *ddl__setting_near(const char *name, size_t length) {
    const char *near_name = NULL;
    int32_t least = (int32_t)(length - strlen("DDL_")) / 3 + 1; /* so many letters of it may be wrong */
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        int32_t distance = ddl__name_distance(name, length, ddl__setting_table[i].name);
        if (distance < least || (near_name == NULL && distance == least)) {
            least = distance;
            near_name = ddl__setting_table[i].name;
        }
    }
    return near_name;
}

/* A line of the environment, NAME=value, that names a setting, neither ours nor of a plugin of ddl's, its benchmarks
 * or tests. Gives the length of the name, 0 for others. */
static size_t ddl__setting_unknown(const char *line) {
    static const char *const others[] = {"FABRIC_", "SHM_", "CUDA_", "BENCH_", "TEST_"};
    size_t length = strcspn(line, "=");
    if (strncmp(line, "DDL_", 4) != 0) {
        return 0;
    }
    for (size_t i = 0; i < DDL__COUNT_OF(others); i++) {
        if (strncmp(line + 4, others[i], strlen(others[i])) == 0) {
            return 0;
        }
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__setting_table); i++) {
        if (strlen(ddl__setting_table[i].name) == length && strncmp(line, ddl__setting_table[i].name, length) == 0) {
            return 0;
        }
    }
    return length;
}

static void ddl__setting_warn(const ddl__base *base, ddl_log_level level, const char *name, size_t length) {
    const char *near_name = ddl__setting_near(name, length);
    int shown = (int)DDL__MIN(length, (size_t)DDL__NAME_MAX);
    if (near_name != NULL) {
        ddl__log(base, level, "%.*s is no setting of ddl; did you mean %s?", shown, name, near_name);
    } else {
        ddl__log(base, level, "%.*s is no setting of ddl; ddl-info lists those that there are", shown, name);
    }
}

/* >>settings */
/* settings: ddl_config made whole with the environment, once, at the start of ddl_init. What comes after asks this
 * struct and not the environment. It must not open a socket, and it never changes the environment. */

typedef struct ddl__settings {
    ddl__launch launch;       /* rank, world, local_rank, local_world */
    ddl__meeting_place place; /* where the ranks meet */
    ddl_exchange_fn exchange;
    void *exchange_user;
    const uint8_t *secret; /* NULL: the job has none */
    size_t secret_bytes;
    const char *secret_source; /* for messages: "DDL_SECRET_FILE" */
    char *job;                 /* NULL: not told */
    uint64_t job_id;           /* its hash; 0 without one */
    char *interface_name, *advertise, *transports, *plugins, *plugin_path, *algorithm, *tune_cache; /* NULL: not told */
    char *port_range;
    int32_t port_first, port_last; /* 0: any */
    int64_t timeout_ms, stall_ms;  /* -1: none */
    int64_t init_timeout_ms;
    bool progress_thread, deterministic, check_payload, self_test, spread;
    int32_t cores;
    char host_id[128];
} ddl__settings;

/* Frees what the settings hold; the secret is wiped first. All zero afterwards. */
static void ddl__settings_free(ddl__base *base, ddl__settings *s) {
    char **texts[] = {&s->place.host, &s->place.folder, &s->job,       &s->interface_name,
                      &s->advertise,  &s->transports,   &s->plugins,   &s->plugin_path,
                      &s->algorithm,  &s->tune_cache,   &s->port_range};
    for (size_t i = 0; i < DDL__COUNT_OF(texts); i++) {
        ddl__free(base, *texts[i]);
    }
    ddl__secret secret = {(uint8_t *)s->secret, s->secret_bytes, NULL};
    ddl__secret_free(base, &secret);
    memset(s, 0, sizeof *s);
}

/* What a plugin may ask for: the value of DDL_<name>, or NULL. The secret is none of a plugin's business. */
static const char *ddl__plugin_setting(const char *name) {
    char full[64];
    int n = snprintf(full, sizeof full, "DDL_%s", name);
    return n <= 0 || (size_t)n >= sizeof full || strncmp(name, "SECRET", 6) == 0 ? NULL : ddl__env(full);
}

static ddl_status ddl__settings_base(const ddl_config *config, ddl__base *base, ddl__sentence *why) {
    const ddl_allocator *a = &config->allocator;
    if ((a->alloc == NULL) != (a->free == NULL)) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: allocator of ddl_config has %s without %s; give both or none",
                         a->alloc != NULL ? "alloc" : "free", a->alloc != NULL ? "free" : "alloc");
    }
    base->allocator = *a;
    base->log = config->log;
    base->log_user = config->log_user;
    base->rank = -1;
    return ddl__parse_log_level(config->log_level, &base->log_level, why);
}

/* Jobs that share a host, port or folder are told apart by a hash of the job's name. */
static ddl_status ddl__settings_job(const ddl_config *config, ddl__base *base, ddl__settings *out, ddl__sentence *why) {
    const char *job = config->job != NULL && config->job[0] != 0 ? config->job : ddl__setting_env("DDL_JOB");
    char launched[512];
    if (job == NULL && ddl__launch_job(&out->launch, launched, sizeof launched)) {
        job = launched;
    }
    if (job == NULL) {
        return DDL_OK;
    }
    out->job_id = ddl__mix_bytes(0, job, strlen(job));
    out->job = ddl__copy_string(base, job);
    return out->job != NULL ? DDL_OK : ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the job's name");
}

static ddl_status ddl__settings_check(ddl__settings *out, ddl__sentence *why) {
    const char *text = ddl__setting_env("DDL_CHECK");
    int64_t self_test = 1;
    DDL__TRY(ddl__env_int("DDL_SELF_TEST", 0, 1, &self_test, why));
    out->self_test = self_test == 1;
    if (text != NULL && strcmp(text, "payload") != 0) {
        return ddl__fail(why, DDL_ERR_CONFIG, "ddl_init: DDL_CHECK is \"%.60s\"; payload is possible", text);
    }
    out->check_payload = text != NULL;
    return DDL_OK;
}

static ddl_status ddl__settings_texts(const ddl_config *c, ddl__base *base, ddl__settings *out, ddl__sentence *why) {
    DDL__TRY(ddl__pick_text(base, c->interface_name, "DDL_INTERFACE", &out->interface_name, why));
    DDL__TRY(ddl__pick_text(base, c->advertise, "DDL_ADVERTISE", &out->advertise, why));
    DDL__TRY(ddl__pick_text(base, c->port_range, "DDL_PORT_RANGE", &out->port_range, why));
    DDL__TRY(ddl__pick_text(base, c->transports, "DDL_TRANSPORTS", &out->transports, why));
    DDL__TRY(ddl__pick_text(base, c->plugins, "DDL_PLUGINS", &out->plugins, why));
    DDL__TRY(ddl__pick_text(base, NULL, "DDL_PLUGIN_PATH", &out->plugin_path, why));
    DDL__TRY(ddl__pick_text(base, c->algorithm, "DDL_ALGO", &out->algorithm, why));
    DDL__TRY(ddl__pick_text(base, NULL, "DDL_TUNE_CACHE", &out->tune_cache, why));
    return out->port_range == NULL ? DDL_OK
                                   : ddl__parse_port_range(out->port_range, &out->port_first, &out->port_last, why);
}

static ddl_status ddl__settings_numbers(const ddl_config *c, ddl__settings *out, ddl__sentence *why) {
    out->timeout_ms = 300000;
    out->init_timeout_ms = 60000;
    out->stall_ms = 10000;
    DDL__TRY(ddl__pick_int(c->timeout_ms, "timeout_ms", "DDL_TIMEOUT_MS", true, DDL__MS_MAX, &out->timeout_ms, why));
    DDL__TRY(ddl__pick_int(c->init_timeout_ms, "init_timeout_ms", "DDL_INIT_TIMEOUT_MS", false, DDL__MS_MAX,
                           &out->init_timeout_ms, why));
    DDL__TRY(ddl__pick_int(c->stall_ms, "stall_ms", "DDL_STALL_MS", true, DDL__MS_MAX, &out->stall_ms, why));
    DDL__TRY(
        ddl__pick_switch(c->progress_thread, "progress_thread", "DDL_PROGRESS_THREAD", &out->progress_thread, why));
    DDL__TRY(ddl__pick_switch(c->deterministic, "deterministic", "DDL_DETERMINISTIC", &out->deterministic, why));
    out->spread = true;
    DDL__TRY(ddl__pick_switch(0, "", "DDL_SPREAD", &out->spread, why));
    return ddl__settings_check(out, why);
}

static ddl_status ddl__settings_fill(const ddl_config *config, ddl__base *base, ddl__settings *out,
                                     ddl__sentence *why) {
    DDL__TRY(ddl__settings_base(config, base, why));
    DDL__TRY(ddl__launch_find(config, &out->launch, why));
    base->rank = out->launch.rank;
    DDL__TRY(ddl__settings_job(config, base, out, why));
    DDL__TRY(ddl__place_find(base, config, &out->launch, out->job != NULL, &out->place, why));
    if (out->launch.world == 1) {
        out->place.kind = DDL__MEET_ALONE;
    }
    DDL__TRY(ddl__settings_texts(config, base, out, why));
    DDL__TRY(ddl__settings_numbers(config, out, why));
    ddl__secret secret = {NULL, 0, NULL};
    DDL__TRY(ddl__secret_find(base, config, &secret, why));
    out->secret = secret.bytes;
    out->secret_bytes = secret.count;
    out->secret_source = secret.source;
    out->exchange = config->exchange;
    out->exchange_user = config->exchange_user;
    out->cores = ddl__cores();
    const char *host = ddl__setting_env("DDL_HOST_ID");
    if (host != NULL) {
        snprintf(out->host_id, sizeof out->host_id, "%s", host);
    } else {
        ddl__host_id(out->host_id, sizeof out->host_id);
    }
    return DDL_OK;
}

/* Fills *base (allocator, log, rank) and *out. config may be NULL. Reads the environment and opens the secret's file;
 * changes nothing. On error *out is empty. Errors: DDL_ERR_CONFIG, DDL_ERR_NOMEM. */
static ddl_status ddl__settings_read(const ddl_config *config, ddl__base *base, ddl__settings *out,
                                     ddl__sentence *why) {
    static const ddl_config nothing;
    memset(out, 0, sizeof *out);
    ddl_status status = ddl__settings_fill(config != NULL ? config : &nothing, base, out, why);
    if (status != DDL_OK) {
        ddl__settings_free(base, out);
    }
    return status;
}

/* >>store/record */
/* record: what rank 0 and the others say to each other once both are proven, and how ranks are listed in a sentence.
 *
 *     0  kind u8, status u8 (of an error: minus the ddl_status), 0 u16, payload bytes u32     little-endian
 *     8  payload
 *
 *     BLOB     to rank 0     this rank's blob
 *     TABLE    from rank 0   the blobs of all ranks, in order of rank
 *     TAKEN    to rank 0     the table is here; rank 0 may go
 *     GIVE_UP  to rank 0     my deadline is over: tell me, and all, who is missing
 *     FAILED   from rank 0   the start has failed; a sentence that says why, to be repeated by everybody
 */

#define DDL__RECORD_BYTES 8
#define DDL__BLOB_MAX 4096

enum ddl__record_kind {
    DDL__RECORD_BLOB = 1,
    DDL__RECORD_TABLE = 2,
    DDL__RECORD_TAKEN = 3,
    DDL__RECORD_GIVE_UP = 4,
    DDL__RECORD_FAILED = 5
};

typedef struct ddl__record {
    uint8_t kind;
    ddl_status status;
    uint32_t bytes;
} ddl__record;

static void ddl__record_write(uint8_t out[DDL__RECORD_BYTES], uint8_t kind, ddl_status status, size_t bytes) {
    ddl__writer w = ddl__writer_of(out, DDL__RECORD_BYTES);
    ddl__put_u8(&w, kind);
    ddl__put_u8(&w, (uint8_t)-status);
    ddl__put_u16(&w, 0);
    ddl__put_u32(&w, (uint32_t)bytes);
}

/* A status that this version does not know becomes DDL_ERR_INTERNAL. Lengths are for the caller to bound. */
static ddl__record ddl__record_read(const uint8_t in[DDL__RECORD_BYTES]) {
    ddl__reader r = ddl__reader_of(in, DDL__RECORD_BYTES);
    ddl__record record;
    record.kind = ddl__get_u8(&r);
    int status = ddl__get_u8(&r);
    record.status = status == 0 || status > -DDL_ERR_INTERNAL ? DDL_ERR_INTERNAL : (ddl_status)-status;
    (void)ddl__get_u16(&r);
    record.bytes = ddl__get_u32(&r);
    return record;
}

/* Text from a peer goes into a sentence and so to a terminal: no control characters. */
static void ddl__text_clean(char *text) {
    for (; *text != 0; text++) {
        if ((unsigned char)*text < 32 || *text == 127) {
            *text = '?';
        }
    }
}

/* Whether the blobs of all ranks follow. */
static bool ddl__record_is_table(const ddl__record *record, int32_t world, size_t blob_bytes) {
    return record->kind == DDL__RECORD_TABLE && record->bytes == (uint64_t)world * blob_bytes;
}

/* A record FAILED becomes an error: text is what followed it, with room for a 0 behind. where: "node1:29500" */
static ddl_status ddl__record_sentence(const ddl__record *record, char *text, size_t bytes, const char *where,
                                       ddl__sentence *why) {
    text[bytes] = 0;
    ddl__text_clean(text);
    return text[0] != 0 ? ddl__fail(why, record->status, "%s", text)
                        : ddl__fail(why, record->status, "ddl_init: rank 0 at %s reported: %s", where,
                                    ddl_status_text(record->status));
}

/* Adds "rank 3" or "ranks 3, 5-7" for the ranks whose state is below `least`; after 16 runs "and more". */
static void ddl__text_ranks_below(ddl__text *text, const uint8_t *state, int32_t world, uint8_t least) {
    char list[512];
    ddl__text runs = {list, sizeof list, 0};
    int32_t count = 0, run_count = 0;
    list[0] = 0;
    for (int32_t r = 0; r < world; r++) {
        if (state[r] >= least) {
            continue;
        }
        int32_t last = r;
        while (last + 1 < world && state[last + 1] < least) {
            last++;
        }
        const char *comma = run_count > 0 ? ", " : "";
        if (run_count < 16) {
            ddl__text_add(&runs, last > r ? "%s%d-%d" : "%s%d", comma, r, last);
        } else if (run_count == 16) {
            ddl__text_add(&runs, " and more");
        }
        run_count++;
        count += last - r + 1;
        r = last;
    }
    ddl__text_add(text, "%s %s", count == 1 ? "rank" : "ranks", list);
}

/* >>store/address */
/* address: names to addresses, which of them are this machine's, and who holds a port. */

#define DDL__ADDRESSES_MAX 8

typedef struct ddl__address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_un local;
        struct sockaddr_storage room;
    } at;
    socklen_t bytes;
} ddl__address;

typedef struct ddl__addresses {
    ddl__address list[DDL__ADDRESSES_MAX];
    int count;
} ddl__addresses;

static void ddl__address_set_port(ddl__address *a, int32_t port) {
    if (a->at.any.sa_family == AF_INET6) {
        a->at.v6.sin6_port = htons((uint16_t)port);
    } else if (a->at.any.sa_family == AF_INET) {
        a->at.v4.sin_port = htons((uint16_t)port);
    }
}

static void ddl__addresses_add(ddl__addresses *out, const struct sockaddr *from) {
    socklen_t bytes = from->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if ((from->sa_family == AF_INET || from->sa_family == AF_INET6) && out->count < DDL__ADDRESSES_MAX) {
        ddl__address *a = &out->list[out->count++];
        memset(a, 0, sizeof *a);
        memcpy(&a->at, from, bytes);
        a->bytes = bytes;
    }
}

/* 0, or what gai_strerror explains. May block as long as the system's resolver does. */
static int ddl__resolve(const char *host, ddl__addresses *out) {
    struct addrinfo want, *found = NULL;
    memset(&want, 0, sizeof want);
    want.ai_socktype = SOCK_STREAM;
    out->count = 0;
    int error = getaddrinfo(host, NULL, &want, &found);
    for (struct addrinfo *i = found; error == 0 && i != NULL; i = i->ai_next) {
        ddl__addresses_add(out, i->ai_addr);
    }
    if (found != NULL) {
        freeaddrinfo(found);
    }
    return error == 0 && out->count == 0 ? EAI_NONAME : error;
}

/* Addresses of one interface, or of all when name is NULL; without the link-local ones, which need a scope. */
static void ddl__interface_addresses(const char *name, ddl__addresses *out) {
    struct ifaddrs *all = NULL;
    out->count = 0;
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (struct ifaddrs *i = all; i != NULL; i = i->ifa_next) {
        bool wanted = name != NULL ? strcmp(i->ifa_name, name) == 0 : (i->ifa_flags & IFF_LOOPBACK) == 0;
        if (!wanted || i->ifa_addr == NULL || (i->ifa_flags & IFF_UP) == 0) {
            continue;
        }
        if (i->ifa_addr->sa_family == AF_INET6) {
            struct sockaddr_in6 v6;
            memcpy(&v6, i->ifa_addr, sizeof v6);
            if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) {
                continue;
            }
        }
        ddl__addresses_add(out, i->ifa_addr);
    }
    freeifaddrs(all);
}

/* "10.0.0.5:29500", "[::1]:29500", or "a unix socket". */
static const char *ddl__address_text(const ddl__address *a, char *out, size_t cap) {
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->at.any.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &a->at.v6.sin6_addr, host, sizeof host);
        snprintf(out, cap, "[%s]:%d", host, ntohs(a->at.v6.sin6_port));
    } else if (a->at.any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &a->at.v4.sin_addr, host, sizeof host);
        snprintf(out, cap, "%s:%d", host, ntohs(a->at.v4.sin_port));
    } else {
        snprintf(out, cap, "a unix socket");
    }
    return out;
}

static bool ddl__address_is_loopback(const ddl__address *a) {
    if (a->at.any.sa_family == AF_INET6) {
        return IN6_IS_ADDR_LOOPBACK(&a->at.v6.sin6_addr);
    }
    return a->at.any.sa_family == AF_INET && (ntohl(a->at.v4.sin_addr.s_addr) >> 24) == 127;
}

/* Whether a socket of this machine can have the address: the kernel decides, with any port. */
static bool ddl__address_is_mine(const ddl__address *a) {
    ddl__address probe = *a;
    ddl__address_set_port(&probe, 0);
    int fd = socket(probe.at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    bool mine = bind(fd, &probe.at.any, probe.bytes) == 0;
    close(fd);
    return mine;
}

static bool ddl__addresses_have_mine(const ddl__addresses *list) {
    for (int i = 0; i < list->count; i++) {
        if (ddl__address_is_mine(&list->list[i])) {
            return true;
        }
    }
    return false;
}

/* The ranks meet on a unix socket: there is no secret, or their launcher says that they are all on this host. */
static bool ddl__place_is_here(const ddl__settings *s) { return s->secret == NULL || s->place.port == 0; }

/* The socket of a job without a secret: in the abstract namespace, so nothing is left behind whatever happens. Names
 * are free to all users of the host; who is behind one is checked by SO_PEERCRED. */
static void ddl__address_of_unix(ddl__address *out, int32_t port, uint64_t job) {
    memset(out, 0, sizeof *out);
    out->at.local.sun_family = AF_UNIX;
    int n = snprintf(out->at.local.sun_path + 1, sizeof out->at.local.sun_path - 1, "ddl-%lu-%d-%016" PRIx64,
                     (unsigned long)geteuid(), port, job);
    out->bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* What a sentence calls that socket. */
static void ddl__unix_text(const ddl__settings *s, char *out, size_t cap) {
    if (s->place.port == 0) {
        snprintf(out, cap, "the unix socket of job %.80s on this host", s->job);
    } else {
        snprintf(out, cap, "the unix socket of %.80s port %d", s->place.host, s->place.port);
    }
}

/* The user at the other end of a connected unix socket, -1 when unknown. */
static long ddl__socket_uid(int fd) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 ? (long)peer.uid : -1;
}

/* A line of a table of /proc/net: whether its socket listens on the port (state 0A), and its inode and user. */
static bool ddl__listener_parse(const char *line, int32_t port, unsigned long *out_inode, unsigned *out_uid) {
    unsigned local, state;
    return sscanf(line, " %*d: %*[0-9A-F]:%4x %*[0-9A-F]:%*4x %2x %*s %*s %*s %u %*d %lu", &local, &state, out_uid,
                  out_inode) == 4 &&
           state == 0x0a && local == (unsigned)port;
}

static bool ddl__find_listener(const char *path, int32_t port, unsigned long *out_inode, unsigned *out_uid) {
    FILE *file = fopen(path, "re");
    char line[512];
    bool found = false;
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = ddl__listener_parse(line, port, out_inode, out_uid);
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static bool ddl__process_holds(const char *pid, const char *socket_name) {
    char path[300], link[64];
    snprintf(path, sizeof path, "/proc/%.32s/fd", pid);
    DIR *folder = opendir(path);
    bool holds = false;
    for (struct dirent *e; folder != NULL && !holds && (e = readdir(folder)) != NULL;) {
        ssize_t n = readlinkat(dirfd(folder), e->d_name, link, sizeof link - 1);
        holds = n > 0 && (size_t)n == strlen(socket_name) && memcmp(link, socket_name, (size_t)n) == 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return holds;
}

/* Adds who listens on a port of this machine, as far as /proc tells: " by process 12 (nginx)". For a sentence. */
static void ddl__text_port_holder(ddl__text *text, int32_t port) {
    unsigned long inode = 0;
    unsigned uid = 0;
    char name[64], path[80], program[64];
    if (!ddl__find_listener("/proc/net/tcp", port, &inode, &uid) &&
        !ddl__find_listener("/proc/net/tcp6", port, &inode, &uid)) {
        return;
    }
    snprintf(name, sizeof name, "socket:[%lu]", inode);
    DIR *processes = opendir("/proc");
    for (struct dirent *e; processes != NULL && (e = readdir(processes)) != NULL;) {
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && ddl__process_holds(e->d_name, name)) {
            snprintf(path, sizeof path, "/proc/%.32s/comm", e->d_name);
            ssize_t n = ddl__read_text(path, program, sizeof program);
            program[n > 0 ? strcspn(program, "\n") : 0] = 0;
            ddl__text_clean(program);
            ddl__text_add(text, " by process %.32s (%s)", e->d_name, program);
            closedir(processes);
            return;
        }
    }
    if (processes != NULL) {
        closedir(processes);
    }
    ddl__text_add(text, " by a process of user %u", uid);
}

/* >>store/server */
/* server: rank 0's side of the rendezvous. One thread, one epoll, no waiting for any one connection: whoever does not
 * prove the job's secret in time costs a counter and a debug line. It sees descriptors that listen, not how they came
 * to be. What a stranger can make it hold: DDL__STRANGERS_MAX connections of sizeof(ddl__guest) bytes. */

#define DDL__LISTENERS_MAX DDL__ADDRESSES_MAX
#define DDL__STRANGERS_MAX 64
#define DDL__PROOF_NS (5 * DDL__NS_PER_S)    /* to prove oneself */
#define DDL__EVICT_NS (250 * DDL__NS_PER_MS) /* so old is a silent one that makes room for another */
#define DDL__LEAVE_NS (1 * DDL__NS_PER_S)    /* for the last words to arrive */
#define DDL__DELIVER_NS (5 * DDL__NS_PER_S)  /* for the table to arrive */

/* What a connection is at. From DDL__GUEST_HEAD on it is proven and its rank is its own. */
enum ddl__guest_stage {
    DDL__GUEST_NONE,
    DDL__GUEST_PROOF,   /* in the handshake */
    DDL__GUEST_HEAD,    /* a record's header comes next */
    DDL__GUEST_BLOB,    /* its blob comes next */
    DDL__GUEST_LEAVING, /* told why; what it still says is thrown away */
};

/* What is known of a rank. */
enum ddl__rank_state { DDL__RANK_AWAY, DDL__RANK_PROVEN, DDL__RANK_HERE, DDL__RANK_SERVED };

typedef struct ddl__guest {
    int fd;
    uint8_t stage, head_bytes, out_at, out_end;
    bool heard, writing;
    uint32_t rank, blob_bytes;
    uint64_t since_ns;
    uint8_t head[DDL__RECORD_BYTES];
    uint8_t out[192]; /* all that is ever sent but for tails: challenge 80, verdict 36, record 8 */
    const void *tail; /* the table or a sentence, not copied */
    size_t tail_at, tail_bytes;
    ddl__auth auth;
    char from[64];
} ddl__guest;

_Static_assert(sizeof(ddl__guest) <= 4096, "a stranger holds more than 4 KiB");

typedef struct ddl__server {
    const ddl__settings *settings;
    ddl__base *base;
    size_t blob_bytes;
    uint8_t *table;
    int epoll, spare, listeners[DDL__LISTENERS_MAX], listener_count;
    bool by_uid;     /* unix sockets: the kernel says who it is */
    bool resting;    /* listeners are out of the epoll until rest_ns: no room */
    char where[160]; /* "10.0.0.5:29500" */
    ddl__guest *guests;
    int32_t guest_count, strangers_now;
    uint8_t *ranks; /* enum ddl__rank_state of each */
    int32_t here, served;
    uint64_t start_ns, rest_ns, end_ns; /* end_ns: deadline of what goes on now */
    uint64_t strangers;
    char last_stranger[160];
    char world_text[160]; /* for ranks that count otherwise */
    bool delivering, failing;
    ddl__sentence *why;
} ddl__server;

static bool ddl__guest_proven(const ddl__guest *g) { return g->stage >= DDL__GUEST_HEAD; }

static void ddl__guest_close(ddl__server *server, ddl__guest *g) {
    if (g->stage == DDL__GUEST_NONE) {
        return;
    }
    server->strangers_now -= g->stage == DDL__GUEST_PROOF;
    close(g->fd); /* leaves the epoll by itself: no other descriptor shares the socket */
    ddl__auth_wipe(&g->auth);
    memset(g, 0, sizeof *g);
    g->fd = -1;
}

static void ddl__guest_stranger(ddl__server *server, ddl__guest *g, const char *what) {
    server->strangers++;
    snprintf(server->last_stranger, sizeof server->last_stranger, "%s: %s", g->from, what);
    ddl__log(server->base, DDL_LOG_DEBUG, "a connection from %s was turned away: %s", g->from, what);
    ddl__guest_close(server, g);
}

static void ddl__guest_arm(ddl__server *server, ddl__guest *g, bool writing) {
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0u),
                                .data.u32 = (uint32_t)(g - server->guests) + DDL__LISTENERS_MAX};
    if (writing != g->writing) {
        (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, g->fd, &event);
        g->writing = writing;
    }
}

/* Sends what it takes. False: the connection is gone. */
static bool ddl__guest_flush(ddl__server *server, ddl__guest *g) {
    while (g->out_at < g->out_end || g->tail_at < g->tail_bytes) {
        bool head = g->out_at < g->out_end;
        const void *from = head ? g->out + g->out_at : (const uint8_t *)g->tail + g->tail_at;
        size_t bytes = head ? (size_t)(g->out_end - g->out_at) : g->tail_bytes - g->tail_at;
        ssize_t n = send(g->fd, from, bytes, MSG_NOSIGNAL | (head && g->tail_bytes > 0 ? MSG_MORE : 0));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            ddl__guest_arm(server, g, true);
            return true;
        }
        if (n < 0) {
            return false;
        }
        if (head) {
            g->out_at = (uint8_t)(g->out_at + n);
        } else {
            g->tail_at += (size_t)n;
        }
    }
    ddl__guest_arm(server, g, false);
    if (g->stage == DDL__GUEST_LEAVING) { /* not close: unread input would turn it into a reset, and that eats words */
        (void)shutdown(g->fd, SHUT_WR);
    }
    return true;
}

/* Queues a record. What tail points to must stay. */
static void ddl__guest_say(ddl__guest *g, uint8_t kind, ddl_status status, const void *tail, size_t bytes) {
    ddl__record_write(g->out + g->out_end, kind, status, bytes);
    g->out_end = (uint8_t)(g->out_end + DDL__RECORD_BYTES);
    g->tail = tail;
    g->tail_at = 0;
    g->tail_bytes = bytes;
}

/* Tells a proven member why it cannot take part, and lets it go. The job goes on. text must stay: a literal. */
static void ddl__guest_dismiss(ddl__server *server, ddl__guest *g, ddl_status status, const char *text) {
    ddl_log_level level = g->auth.code == DDL__AUTH_JOB ? DDL_LOG_DEBUG : DDL_LOG_WARN; /* that one will come again */
    ddl__log(server->base, level, "turned away rank %u from %s: %s", g->auth.peer_rank, g->from, text);
    server->strangers_now -= g->stage == DDL__GUEST_PROOF;
    ddl__guest_say(g, DDL__RECORD_FAILED, status, text, strlen(text));
    g->stage = DDL__GUEST_LEAVING;
    g->since_ns = ddl__now_ns();
}

static void ddl__server_close_listeners(ddl__server *server) {
    for (int i = 0; i < server->listener_count; i++) {
        close(server->listeners[i]);
    }
    server->listener_count = 0;
}

/* The start has failed: everybody who is here hears the sentence in server->why. Returns its status. */
static void ddl__server_fail(ddl__server *server) {
    server->failing = true;
    server->end_ns = ddl__now_ns() + DDL__LEAVE_NS;
    ddl__server_close_listeners(server);
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF || (ddl__guest_proven(g) && g->tail_at < g->tail_bytes)) {
            ddl__guest_close(server, g);
        } else if (g->stage == DDL__GUEST_HEAD || g->stage == DDL__GUEST_BLOB) {
            ddl__guest_say(g, DDL__RECORD_FAILED, server->why->status, server->why->text, strlen(server->why->text));
            g->stage = DDL__GUEST_LEAVING;
            g->since_ns = ddl__now_ns();
            if (!ddl__guest_flush(server, g)) {
                ddl__guest_close(server, g);
            }
        }
    }
}

static void ddl__server_fail_missing(ddl__server *server) {
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    char host[65] = "?";
    int32_t world = server->settings->launch.world;
    (void)gethostname(host, sizeof host - 1);
    ddl__text_add(&text, "ddl_init: ");
    ddl__text_ranks_below(&text, server->ranks, world, DDL__RANK_HERE);
    ddl__text_add(&text, " of %d %s not come within %.1f s to rank 0 at %s (process %ld on %s)", world,
                  world - server->here == 1 ? "has" : "have",
                  (double)(ddl__now_ns() - server->start_ns) / (double)DDL__NS_PER_S, server->where, (long)getpid(),
                  host);
    if (server->strangers > 0) {
        ddl__text_add(&text, "; %llu connections did not prove that they belong to the job, the last from %s",
                      (unsigned long long)server->strangers, server->last_stranger);
    }
    ddl__text_add(&text, ". Look at what the missing ranks print; they need the same rendezvous, job and secret as the "
                         "others");
    server->why->status = DDL_ERR_TIMEOUT;
    ddl__server_fail(server);
}

static void ddl__server_name_lost(ddl__server *server, const ddl__guest *g, const char *what) {
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    ddl__text_add(&text, "ddl_init: rank %u (from %s) %s during the start, while ", g->rank, g->from, what);
    ddl__text_ranks_below(&text, server->ranks, server->settings->launch.world, DDL__RANK_HERE);
    ddl__text_add(&text, " of %d had not come yet. Look at what rank %u printed last", server->settings->launch.world,
                  g->rank);
    server->why->status = DDL_ERR_PEER;
}

/* The connection is gone, whoever closed it. Before its blob is here a rank may come again; after it, it has died. */
static void ddl__guest_gone(ddl__server *server, ddl__guest *g, const char *what) {
    uint8_t *state = &server->ranks[g->rank];
    if (g->stage == DDL__GUEST_PROOF) {
        ddl__guest_stranger(server, g, g->heard ? "it left during the handshake" : "it left without a word");
        return;
    }
    bool died = *state == DDL__RANK_HERE && g->stage != DDL__GUEST_LEAVING && !server->failing;
    if (g->stage != DDL__GUEST_LEAVING && *state == DDL__RANK_PROVEN) {
        *state = DDL__RANK_AWAY;
    }
    if (died && server->delivering) { /* it will be missed by its peers; the table is on its way to all */
        *state = DDL__RANK_SERVED;
        server->served++;
    } else if (died) {
        ddl__server_name_lost(server, g, what);
        ddl__guest_close(server, g);
        ddl__server_fail(server);
        return;
    }
    ddl__guest_close(server, g);
}

/* All blobs are here. */
static void ddl__server_deliver(ddl__server *server) {
    size_t bytes = (size_t)server->settings->launch.world * server->blob_bytes;
    server->delivering = true;
    server->end_ns = ddl__now_ns() + DDL__DELIVER_NS;
    ddl__server_close_listeners(server);
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF) {
            ddl__guest_stranger(server, g, "the job is complete without it");
        } else if (g->stage == DDL__GUEST_HEAD) {
            ddl__guest_say(g, DDL__RECORD_TABLE, DDL_OK, server->table, bytes);
            if (!ddl__guest_flush(server, g)) {
                ddl__guest_gone(server, g, "left");
            }
        }
    }
}

static void ddl__guest_record(ddl__server *server, ddl__guest *g) {
    ddl__record record = ddl__record_read(g->head);
    uint8_t *state = &server->ranks[g->rank];
    g->head_bytes = 0;
    if (record.kind == DDL__RECORD_BLOB && *state == DDL__RANK_PROVEN && record.bytes == server->blob_bytes) {
        g->stage = DDL__GUEST_BLOB;
    } else if (record.kind == DDL__RECORD_BLOB && *state == DDL__RANK_PROVEN) {
        *state = DDL__RANK_AWAY;
        ddl__guest_dismiss(
            server, g, DDL_ERR_VERSION,
            "ddl_init: this rank brings another amount of data than rank 0: they are built from different "
            "versions of ddl.h");
    } else if (record.kind == DDL__RECORD_TAKEN && server->delivering) {
        *state = DDL__RANK_SERVED;
        server->served++;
        ddl__guest_close(server, g);
    } else if (record.kind == DDL__RECORD_GIVE_UP && !server->delivering) {
        ddl__server_fail_missing(server);
    } else {
        ddl__guest_gone(server, g, "sent what makes no sense");
    }
}

static void ddl__guest_admit(ddl__server *server, ddl__guest *g) {
    server->strangers_now--;
    g->stage = DDL__GUEST_HEAD;
    g->rank = g->auth.peer_rank;
    server->ranks[g->rank] = DDL__RANK_PROVEN;
    ddl__wipe(&g->auth.secret, sizeof g->auth.secret);
    ddl__log(server->base, DDL_LOG_DEBUG, "rank %u has come from %s", g->rank, g->from);
}

/* The handshake has ended badly. Only who holds the secret hears why. */
static void ddl__guest_refuse(ddl__server *server, ddl__guest *g, ddl_status status) {
    switch (g->auth.code) {
    case DDL__AUTH_JOB:
        ddl__guest_dismiss(server, g, DDL_ERR_AUTH,
                           "ddl_init: the rank 0 that listens at MASTER_ADDR and MASTER_PORT belongs to another job; "
                           "give each job its own port");
        break;
    case DDL__AUTH_WORLD:
        ddl__guest_dismiss(server, g, DDL_ERR_CONFIG, server->world_text);
        break;
    case DDL__AUTH_DUPLICATE:
        ddl__guest_dismiss(
            server, g, DDL_ERR_CONFIG,
            "ddl_init: another process with the same rank has come before this one; every rank is started "
            "once, with its own RANK");
        break;
    case DDL__AUTH_RANK:
        ddl__guest_dismiss(server, g, DDL_ERR_CONFIG, "ddl_init: rank 0 knows no such rank");
        break;
    case DDL__AUTH_VERSION:
        (void)ddl__guest_flush(server, g);
        ddl__guest_stranger(server, g, "it speaks another version of ddl");
        break;
    default:
        ddl__guest_stranger(server, g,
                            status == DDL_ERR_CORRUPT ? "it does not speak ddl" : "it does not know the job's secret");
    }
}

/* Takes bytes for the handshake; returns how many. */
static size_t ddl__guest_prove(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    size_t used = 0, wrote = 0;
    uint32_t claimed = g->auth.peer_rank, world = (uint32_t)server->settings->launch.world;
    if (g->auth.peer_world != 0 && claimed >= world) {
        ddl__auth_refuse(&g->auth, DDL__AUTH_RANK);
    } else if (g->auth.peer_world != 0 && server->ranks[claimed] != DDL__RANK_AWAY) {
        ddl__auth_refuse(&g->auth, DDL__AUTH_DUPLICATE);
    }
    ddl_status status =
        ddl__auth_step(&g->auth, in, bytes, &used, g->out + g->out_end, sizeof g->out - g->out_end, &wrote);
    g->out_end = (uint8_t)(g->out_end + wrote);
    g->heard = true;
    if (status == DDL_OK) {
        ddl__guest_admit(server, g);
    } else if (status < 0) {
        ddl__guest_refuse(server, g, status);
    }
    return used;
}

/* Takes bytes of a record; returns how many. */
static size_t ddl__guest_collect(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    size_t n;
    if (g->stage == DDL__GUEST_HEAD) {
        n = DDL__MIN(bytes, (size_t)(DDL__RECORD_BYTES - g->head_bytes));
        memcpy(g->head + g->head_bytes, in, n);
        g->head_bytes = (uint8_t)(g->head_bytes + n);
        if (g->head_bytes == DDL__RECORD_BYTES) {
            ddl__guest_record(server, g);
        }
        return n;
    }
    n = DDL__MIN(bytes, server->blob_bytes - g->blob_bytes);
    memcpy(server->table + (size_t)g->rank * server->blob_bytes + g->blob_bytes, in, n);
    g->blob_bytes += (uint32_t)n;
    if (g->blob_bytes == server->blob_bytes) {
        g->stage = DDL__GUEST_HEAD;
        server->ranks[g->rank] = DDL__RANK_HERE;
        if (++server->here == server->settings->launch.world) {
            ddl__server_deliver(server);
        }
    }
    return n;
}

static void ddl__guest_feed(ddl__server *server, ddl__guest *g, const uint8_t *in, size_t bytes) {
    while (bytes > 0 && g->stage != DDL__GUEST_NONE && g->stage != DDL__GUEST_LEAVING) {
        size_t n = g->stage == DDL__GUEST_PROOF ? ddl__guest_prove(server, g, in, bytes)
                                                : ddl__guest_collect(server, g, in, bytes);
        in += n;
        bytes -= n;
    }
}

/* One read an event: a fast talker must not keep the others waiting. */
static void ddl__guest_event(ddl__server *server, ddl__guest *g, uint32_t events) {
    uint8_t in[4096];
    if (g->stage == DDL__GUEST_NONE) {
        return; /* closed by an event before this one */
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        ssize_t n = recv(g->fd, in, sizeof in, 0);
        bool later = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
        if (n <= 0 && !later) {
            ddl__guest_gone(server, g, n == 0 ? "left" : "broke off");
            return;
        }
        if (n > 0) {
            ddl__guest_feed(server, g, in, (size_t)n);
        }
    }
    if (g->stage != DDL__GUEST_NONE && !ddl__guest_flush(server, g)) {
        ddl__guest_gone(server, g, "broke off");
    }
}

static void ddl__server_rest(ddl__server *server, bool rest) {
    for (int i = 0; rest != server->resting && i < server->listener_count; i++) {
        struct epoll_event event = {.events = rest ? 0 : EPOLLIN, .data.u32 = (uint32_t)i};
        (void)epoll_ctl(server->epoll, EPOLL_CTL_MOD, server->listeners[i], &event);
    }
    server->resting = rest;
}

/* Makes sure that one more stranger fits: the one that has been silent longest goes, but not before it had a moment.
 * A storm of honest ranks waits in the kernel's queue meanwhile. */
static bool ddl__server_room(ddl__server *server) {
    if (server->strangers_now < DDL__STRANGERS_MAX) {
        return true;
    }
    ddl__guest *oldest = NULL;
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        bool older = oldest == NULL || (g->heard != oldest->heard ? oldest->heard : g->since_ns < oldest->since_ns);
        oldest = g->stage == DDL__GUEST_PROOF && older ? g : oldest;
    }
    uint64_t now = ddl__now_ns();
    if (oldest == NULL || now - oldest->since_ns < DDL__EVICT_NS) {
        server->rest_ns = now + 10 * DDL__NS_PER_MS;
        ddl__server_rest(server, true);
        return false;
    }
    ddl__guest_stranger(server, oldest, "it was silent while others waited");
    return true;
}

static void ddl__guest_begin(ddl__server *server, int fd, const ddl__address *from) {
    ddl__guest *g = NULL;
    for (int32_t i = 0; i < server->guest_count && g == NULL; i++) {
        g = server->guests[i].stage == DDL__GUEST_NONE ? &server->guests[i] : NULL;
    }
    const ddl__settings *s = server->settings;
    ddl__auth_params params = {.secret = s->secret,
                               .secret_bytes = server->by_uid ? 0 : s->secret_bytes,
                               .job = s->job_id,
                               .purpose = DDL__AUTH_STORE,
                               .world = (uint32_t)s->launch.world};
    uint8_t nonce[32];
    struct epoll_event event = {.events = EPOLLIN};
    int yes = 1;
    if (g == NULL || ddl__random(nonce, sizeof nonce) != DDL_OK) {
        close(fd);
        return;
    }
    event.data.u32 = (uint32_t)(g - server->guests) + DDL__LISTENERS_MAX;
    if (ddl__auth_server(&g->auth, &params, nonce) != DDL_OK ||
        epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
        close(fd);
        return;
    }
    g->fd = fd;
    g->stage = DDL__GUEST_PROOF;
    g->since_ns = ddl__now_ns();
    server->strangers_now++;
    ddl__address_text(from, g->from, sizeof g->from);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); /* fails on a unix socket, which has no delay */
    if (server->by_uid && ddl__socket_uid(fd) != (long)geteuid()) {
        ddl__guest_stranger(server, g, "it is another user's");
    }
}

/* Out of descriptors: takes the connection off the queue with the spare one and lets it go, or accept would report it
 * for ever. The rank tries again. */
static void ddl__server_shed(ddl__server *server, int listener) {
    close(server->spare);
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ddl__log(server->base, DDL_LOG_WARN, "out of file descriptors: a connection was turned away");
}

static void ddl__server_accept(ddl__server *server, int listener) {
    for (int i = 0; i < DDL__STRANGERS_MAX && ddl__server_room(server); i++) {
        ddl__address from;
        memset(&from, 0, sizeof from);
        from.bytes = sizeof from.at;
        int fd = accept4(listener, &from.at.any, &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            ddl__guest_begin(server, fd, &from);
        } else if (errno == EMFILE || errno == ENFILE) {
            ddl__server_shed(server, listener);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

/* Ends what has lasted too long. */
static void ddl__server_sweep(ddl__server *server, uint64_t now) {
    for (int32_t i = 0; i < server->guest_count; i++) {
        ddl__guest *g = &server->guests[i];
        if (g->stage == DDL__GUEST_PROOF && now - g->since_ns > DDL__PROOF_NS) {
            ddl__guest_stranger(server, g, "it did not finish the handshake in time");
        } else if (g->stage == DDL__GUEST_LEAVING && now - g->since_ns > DDL__LEAVE_NS) {
            ddl__guest_close(server, g);
        }
    }
    if (server->resting && now >= server->rest_ns) {
        ddl__server_rest(server, false);
    }
}

static bool ddl__server_done(const ddl__server *server) {
    if (server->failing) {
        for (int32_t i = 0; i < server->guest_count; i++) {
            if (server->guests[i].stage != DDL__GUEST_NONE) {
                return false;
            }
        }
        return true;
    }
    return server->delivering && server->served == server->settings->launch.world;
}

/* The deadline of what goes on has come. False: it ends here. */
static bool ddl__server_overdue(ddl__server *server) {
    if (server->failing) {
        return false;
    }
    if (server->delivering) {
        char list[600] = "";
        ddl__text text = {list, sizeof list, 0};
        ddl__text_ranks_below(&text, server->ranks, server->settings->launch.world, DDL__RANK_SERVED);
        ddl__log(server->base, DDL_LOG_WARN, "%s did not confirm the table of addresses; going on", list);
        return false;
    }
    ddl__server_fail_missing(server);
    return true;
}

static ddl_status ddl__server_loop(ddl__server *server) {
    struct epoll_event events[64];
    uint64_t swept = 0;
    while (!ddl__server_done(server)) {
        uint64_t now = ddl__now_ns();
        if (now >= server->end_ns && !ddl__server_overdue(server)) {
            break;
        }
        uint64_t left = server->end_ns > now ? (server->end_ns - now) / DDL__NS_PER_MS + 1 : 0;
        int n = epoll_wait(server->epoll, events, 64, (int)DDL__MIN(left, server->resting ? 5u : 100u));
        for (int i = 0; i < n; i++) {
            uint32_t id = events[i].data.u32;
            if (id >= DDL__LISTENERS_MAX) {
                ddl__guest_event(server, &server->guests[id - DDL__LISTENERS_MAX], events[i].events);
            } else if ((int)id < server->listener_count) {
                ddl__server_accept(server, server->listeners[id]);
            }
        }
        if (ddl__now_ns() - swept > 5 * DDL__NS_PER_MS) {
            swept = ddl__now_ns(); /* after `now`: connections have been made meanwhile */
            ddl__server_sweep(server, swept);
        }
    }
    return server->failing ? server->why->status : DDL_OK;
}

/* Takes the table from all and gives it to all. Listens on what the caller has bound; closes it. table holds rank 0's
 * blob already. Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_PEER, DDL_ERR_NOMEM, DDL_ERR_SYSTEM. */
static ddl_status ddl__server_serve(ddl__server *server, uint64_t deadline_ns) {
    int32_t world = server->settings->launch.world;
    ddl_status status;
    server->start_ns = ddl__now_ns();
    server->end_ns = deadline_ns;
    snprintf(
        server->world_text, sizeof server->world_text,
        "ddl_init: rank 0 was started for a world of %d, this rank for another; all ranks need the same WORLD_SIZE",
        world);
    server->guest_count = world + DDL__STRANGERS_MAX;
    server->guests = ddl__alloc_array(server->base, (size_t)server->guest_count, sizeof *server->guests);
    server->ranks = ddl__alloc(server->base, (size_t)world);
    server->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (server->guests == NULL || server->ranks == NULL) {
        status = ddl__fail(server->why, DDL_ERR_NOMEM, "ddl_init: no memory for %d connections of rank 0", world);
    } else if (server->epoll < 0) {
        status = ddl__fail(server->why, DDL_ERR_SYSTEM, "ddl_init: epoll_create1: %s", strerror(errno));
    } else {
        server->ranks[0] = DDL__RANK_SERVED;
        server->here = server->served = 1;
        for (int i = 0; i < server->listener_count; i++) {
            struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
            (void)epoll_ctl(server->epoll, EPOLL_CTL_ADD, server->listeners[i], &event);
        }
        status = ddl__server_loop(server);
    }
    ddl__server_close_listeners(server);
    for (int32_t i = 0; server->guests != NULL && i < server->guest_count; i++) {
        ddl__guest_close(server, &server->guests[i]);
    }
    if (server->epoll >= 0) {
        close(server->epoll);
    }
    if (server->spare >= 0) {
        close(server->spare);
    }
    ddl__free(server->base, server->guests);
    ddl__free(server->base, server->ranks);
    return status;
}

/* >>store/listen */
/* listen: how rank 0 comes to its place: the addresses that its name means here, never all of them. */

#ifndef DDL__BIND_NS                     /* tests have less patience */
#define DDL__BIND_NS (2 * DDL__NS_PER_S) /* a job that ends frees the port of one that starts */
#endif

/* Binds and listens; the descriptor, or -1 with errno. */
static int ddl__listen_at(const ddl__address *a) {
    int fd = socket(a->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1;
    if (fd < 0) {
        return -1;
    }
    if (a->at.any.sa_family != AF_UNIX) { /* connections of the job before, in TIME_WAIT, hold no port */
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    }
    if (a->at.any.sa_family == AF_INET6) {
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes);
    }
    if (bind(fd, &a->at.any, a->bytes) == 0 && listen(fd, 4096) == 0) {
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Listens at every address of the list that is this machine's. Returns 0, or the errno of one that failed: half a name
 * would be reachable for half the ranks. */
static int ddl__listen_all(ddl__server *server, const ddl__addresses *list, int32_t port) {
    int error = EADDRNOTAVAIL;
    for (int i = 0; i < list->count && server->listener_count < DDL__LISTENERS_MAX; i++) {
        ddl__address a = list->list[i];
        ddl__address_set_port(&a, port);
        int fd = ddl__listen_at(&a);
        if (fd >= 0) {
            server->listeners[server->listener_count++] = fd;
            ddl__address_text(&a, server->where, sizeof server->where);
        } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
            error = errno;
            ddl__server_close_listeners(server);
            return error;
        }
    }
    return server->listener_count > 0 ? 0 : error;
}

static ddl_status ddl__listen_failed(ddl__server *server, int error) {
    const ddl__meeting_place *place = &server->settings->place;
    ddl__text text = {server->why->text, sizeof server->why->text, 0};
    server->why->status = DDL_ERR_CONFIG;
    if (error == EADDRNOTAVAIL) {
        char mine[64] = "none";
        ddl__addresses all;
        ddl__interface_addresses(NULL, &all);
        if (all.count > 0) {
            ddl__address_text(&all.list[0], mine, sizeof mine);
            *strrchr(mine, ':') = 0;
        }
        ddl__text_add(
            &text,
            "ddl_init: rank 0 runs here, but %s (of %s) is no address of this machine (it has %s). Start rank 0 "
            "there, name this machine on all ranks, or set DDL_INTERFACE on rank 0 when the name leads here by "
            "a proxy",
            place->host, place->from, mine);
    } else if (error == EADDRINUSE) {
        ddl__text_add(&text, "ddl_init: rank 0 cannot listen on port %d of %s: it is taken", place->port, place->host);
        ddl__text_port_holder(&text, place->port);
        ddl__text_add(&text, ". Give this job another MASTER_PORT, or end the other program");
    } else {
        server->why->status = DDL_ERR_SYSTEM;
        ddl__text_add(&text, "ddl_init: rank 0 cannot listen on port %d of %s: %s", place->port, place->host,
                      strerror(error));
    }
    return server->why->status;
}

static void ddl__pause_ms(uint64_t ms) {
    struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    (void)nanosleep(&t, NULL);
}

/* Tries the ports of the place in turn until one is free. */
static ddl_status ddl__listen_ports(ddl__server *server, const ddl__addresses *list) {
    const ddl__meeting_place *place = &server->settings->place;
    uint64_t until = ddl__now_ns() + DDL__BIND_NS;
    for (;;) {
        int error = EADDRINUSE;
        for (int32_t i = 0; i < place->ports && error == EADDRINUSE; i++) {
            error = ddl__listen_all(server, list, place->port + i);
        }
        if (error != EADDRINUSE || ddl__now_ns() >= until) {
            return error == 0 ? DDL_OK : ddl__listen_failed(server, error);
        }
        ddl__pause_ms(20);
    }
}

/* The interface that was named. Where the name of rank 0's host means a loopback address (Debian's 127.0.1.1), ranks of
 * this host come there. */
static ddl_status ddl__listen_interface(ddl__server *server, ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    ddl__addresses named;
    ddl__interface_addresses(s->interface_name, list);
    if (list->count == 0) {
        return ddl__fail(server->why, DDL_ERR_CONFIG,
                         "ddl_init: there is no interface %s with an address here (DDL_INTERFACE)", s->interface_name);
    }
    if (ddl__resolve(s->place.host, &named) == 0) {
        for (int i = 0; i < named.count; i++) {
            if (ddl__address_is_loopback(&named.list[i])) {
                ddl__addresses_add(list, &named.list[i].at.any);
            }
        }
    }
    return DDL_OK;
}

/* Where the name of rank 0's host is to be bound. */
static ddl_status ddl__listen_addresses(ddl__server *server, ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    if (s->interface_name != NULL) {
        return ddl__listen_interface(server, list);
    }
    int error = ddl__resolve(s->place.host, list);
    if (error != 0) {
        return ddl__fail(
            server->why, DDL_ERR_CONFIG,
            "ddl_init: rank 0 cannot find the address of %s (of %s): %s. Name the host that rank 0 runs on as "
            "the others reach it, or give its address",
            s->place.host, s->place.from, gai_strerror(error));
    }
    struct in6_addr literal;
    bool name = inet_pton(AF_INET, s->place.host, &literal) != 1 && inet_pton(AF_INET6, s->place.host, &literal) != 1;
    if (name && strncmp(s->place.host, "localhost", 9) != 0 && list->count > 0 &&
        ddl__address_is_loopback(&list->list[0])) { /* Debian's 127.0.1.1 */
        ddl__log(
            server->base, DDL_LOG_WARN,
            "%s means a loopback address here (see /etc/hosts), so that only this machine reaches rank 0; for more "
            "machines give its address",
            s->place.host);
    }
    return DDL_OK;
}

static ddl_status ddl__no_secret_between_hosts(const ddl__settings *s, ddl__sentence *why) {
    return ddl__fail(
        why, DDL_ERR_AUTH,
        "ddl_init: rank 0 is at %s, which is another machine, and this job has no secret to prove who belongs "
        "to it. Make one, the same on every machine: head -c 32 /dev/urandom > ~/.ddl-secret; chmod 600 "
        "~/.ddl-secret; export DDL_SECRET_FILE=~/.ddl-secret",
        s->place.host);
}

/* Without a secret the job stays on this machine, on a unix socket. */
static ddl_status ddl__listen_unix(ddl__server *server, const ddl__addresses *list) {
    const ddl__settings *s = server->settings;
    uint64_t until = ddl__now_ns() + DDL__BIND_NS;
    ddl__address a;
    int fd;
    if (!ddl__addresses_have_mine(list)) {
        return ddl__no_secret_between_hosts(s, server->why);
    }
    ddl__unix_text(s, server->where, sizeof server->where);
    ddl__address_of_unix(&a, s->place.port, s->job_id);
    while ((fd = ddl__listen_at(&a)) < 0 && errno == EADDRINUSE && ddl__now_ns() < until) {
        ddl__pause_ms(20);
    }
    if (fd < 0) {
        return ddl__fail(server->why, errno == EADDRINUSE ? DDL_ERR_CONFIG : DDL_ERR_SYSTEM,
                         "ddl_init: rank 0 cannot take %s: %s. Another job of this user may have it: "
                         "give this one another MASTER_PORT or DDL_JOB",
                         server->where, strerror(errno));
    }
    server->by_uid = true;
    server->listeners[server->listener_count++] = fd;
    return DDL_OK;
}

static ddl_status ddl__listen(ddl__server *server) {
    ddl__addresses list;
    DDL__TRY(ddl__listen_addresses(server, &list));
    if (ddl__place_is_here(server->settings)) {
        return ddl__listen_unix(server, &list);
    }
    DDL__TRY(ddl__listen_ports(server, &list));
    ddl__log(server->base, DDL_LOG_DEBUG, "rank 0 listens at %s", server->where);
    return DDL_OK;
}

/* >>store/client */
/* client: the side of every rank but 0. It comes again until its deadline: rank 0 may be the last to start, its name
 * may not resolve yet, its port may still belong to the job before. */

#define DDL__CONNECT_NS (2 * DDL__NS_PER_S)
#ifndef DDL__REFUSED_NS
#define DDL__REFUSED_NS (3 * DDL__NS_PER_S) /* how long somebody else may sit at rank 0's place */
#endif

typedef struct ddl__client {
    const ddl__settings *settings;
    ddl__base *base;
    const void *blob;
    size_t blob_bytes;
    uint8_t *table;
    int fd;
    uint64_t deadline_ns, start_ns;
    uint64_t refused_ns; /* since when somebody answers who is not our rank 0; 0: nobody does */
    ddl_status refusal;
    const char *refusal_text;
    char last[200];  /* how the last try ended */
    char where[160]; /* "node1:29500" */
    ddl__sentence *why;
} ddl__client;

/* Waits until the socket can be read or written. False: the time is over. */
static bool ddl__socket_wait(int fd, short events, uint64_t until_ns) {
    for (;;) {
        uint64_t now = ddl__now_ns();
        if (now >= until_ns) {
            return false;
        }
        struct pollfd p = {fd, events, 0};
        int n = poll(&p, 1, (int)DDL__MIN((until_ns - now) / DDL__NS_PER_MS + 1, 10000u));
        if (n > 0) {
            return true;
        }
    }
}

/* Bytes sent; false when the connection or the time ends, errno says which (ETIMEDOUT). */
static bool ddl__socket_send(int fd, const void *data, size_t bytes, uint64_t until_ns) {
    const uint8_t *at = data;
    while (bytes > 0) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n >= 0) {
            at += n;
            bytes -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!ddl__socket_wait(fd, POLLOUT, until_ns)) {
                errno = ETIMEDOUT;
                return false;
            }
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* Some bytes, at least one. 0: the other side closed. -1: errno, ETIMEDOUT among them. */
static ssize_t ddl__socket_some(int fd, void *out, size_t cap, uint64_t until_ns) {
    for (;;) {
        ssize_t n = recv(fd, out, cap, 0);
        if (n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return n;
        }
        if (!ddl__socket_wait(fd, POLLIN, until_ns)) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
}

/* All bytes. 1, or what ddl__socket_some said. */
static int ddl__socket_all(int fd, void *out, size_t bytes, uint64_t until_ns) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = ddl__socket_some(fd, (uint8_t *)out + have, bytes - have, until_ns);
        if (n <= 0) {
            return (int)n;
        }
        have += (size_t)n;
    }
    return 1;
}

static ddl_status __attribute__((format(printf, 2, 3))) ddl__client_again(ddl__client *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->last, sizeof c->last, format, args);
    va_end(args);
    return DDL_IN_PROGRESS;
}

/* Somebody is there who is not our rank 0. */
static ddl_status ddl__client_refused(ddl__client *c, ddl_status status, const char *text) {
    c->refusal = status;
    c->refusal_text = text;
    c->refused_ns = c->refused_ns != 0 ? c->refused_ns : ddl__now_ns();
    return ddl__client_again(c, "%s", text);
}

/* Rank 0's sentence, as it is. */
static ddl_status ddl__client_failed(ddl__client *c, const ddl__record *record, uint64_t until_ns) {
    char text[DDL__SENTENCE_BYTES];
    size_t bytes = DDL__MIN((size_t)record->bytes, sizeof text - 1);
    if (bytes > 0 && ddl__socket_all(c->fd, text, bytes, until_ns) != 1) {
        bytes = 0;
    }
    return ddl__record_sentence(record, text, bytes, c->where, c->why);
}

static ddl_status ddl__client_version(ddl__client *c, const ddl__auth *auth) {
    return ddl__fail(
        c->why, DDL_ERR_VERSION,
        "ddl_init: rank %d speaks version %d.%d of ddl's wire format, rank 0 at %s version %d.%d. Build all ranks "
        "with the same ddl.h",
        c->settings->launch.rank, DDL__WIRE_MAJOR, DDL__WIRE_MINOR, c->where, auth->peer_version >> 8,
        auth->peer_version & 255);
}

/* The handshake was refused, by us or by the other side. */
static ddl_status ddl__client_unproven(ddl__client *c, const ddl__auth *auth, ddl_status status) {
    uint8_t head[DDL__RECORD_BYTES];
    uint64_t until = ddl__now_ns() + DDL__LEAVE_NS;
    if (status == DDL_ERR_CORRUPT) {
        return ddl__client_refused(c, DDL_ERR_CONFIG, "something that is not ddl listens there");
    }
    if (status == DDL_ERR_VERSION) {
        return ddl__client_version(c, auth);
    }
    if (auth->code == DDL__AUTH_PROOF) {
        return ddl__client_refused(c, DDL_ERR_AUTH,
                                   "who listens there does not hold this job's secret: it is another job, or the ranks "
                                   "were given different secrets");
    }
    if (auth->code == DDL__AUTH_JOB) {
        return ddl__client_refused(c, DDL_ERR_AUTH, "who listens there holds the secret, but for another job");
    }
    if (ddl__socket_all(c->fd, head, sizeof head, until) == 1 && head[0] == DDL__RECORD_FAILED) {
        ddl__record record = ddl__record_read(head);
        return ddl__client_failed(c, &record, until);
    }
    return ddl__fail(c->why, DDL_ERR_CONFIG, "ddl_init: rank 0 at %s refuses rank %d of %d: %s", c->where,
                     c->settings->launch.rank, c->settings->launch.world,
                     auth->code == DDL__AUTH_WORLD       ? "its world size is another"
                     : auth->code == DDL__AUTH_DUPLICATE ? "another process has that rank"
                                                         : "it knows no such rank");
}

static ddl_status ddl__client_step(ddl__client *c, ddl__auth *auth, uint64_t until_ns) {
    uint8_t in[DDL__AUTH_BYTES], out[DDL__AUTH_MAX_OUT];
    size_t have = 0, used = 0, wrote = 0;
    for (;;) {
        ddl_status status = ddl__auth_step(auth, in, have, &used, out, sizeof out, &wrote);
        if (wrote > 0 && !ddl__socket_send(c->fd, out, wrote, until_ns)) {
            return ddl__client_again(c, "the handshake broke off: %s", strerror(errno));
        }
        if (status != DDL_IN_PROGRESS) {
            return status == DDL_OK ? DDL_OK : ddl__client_unproven(c, auth, status);
        }
        /* Not a byte beyond the handshake: the reason of a refusal follows the verdict, and stays in the socket. */
        ssize_t n = ddl__socket_some(c->fd, in, (size_t)(DDL__AUTH_BYTES - auth->at), until_ns);
        if (n <= 0) {
            return ddl__client_again(c, "the handshake broke off: %s", n == 0 ? "closed" : strerror(errno));
        }
        have = (size_t)n;
    }
}

static ddl_status ddl__client_prove(ddl__client *c, bool by_uid) {
    const ddl__settings *s = c->settings;
    ddl__auth auth;
    ddl__auth_params params = {.secret = s->secret,
                               .secret_bytes = by_uid ? 0 : s->secret_bytes,
                               .job = s->job_id,
                               .purpose = DDL__AUTH_STORE,
                               .rank = (uint32_t)s->launch.rank,
                               .world = (uint32_t)s->launch.world};
    uint8_t nonce[32];
    if (ddl__random(nonce, sizeof nonce) != DDL_OK || ddl__auth_client(&auth, &params, nonce) != DDL_OK) {
        return ddl__fail(c->why, DDL_ERR_SYSTEM, "ddl_init: the kernel gives no random bytes: %s", strerror(errno));
    }
    ddl_status status = ddl__client_step(c, &auth, DDL__MIN(c->deadline_ns, ddl__now_ns() + 2 * DDL__PROOF_NS));
    ddl__auth_wipe(&auth);
    return status;
}

static ddl_status ddl__client_lost(ddl__client *c) {
    return ddl__fail(
        c->why, DDL_ERR_PEER,
        "ddl_init: rank 0 at %s closed the connection to rank %d before all ranks had come: it probably ended. "
        "Look at what rank 0 printed last",
        c->where, c->settings->launch.rank);
}

/* The header of rank 0's answer. At our deadline rank 0 is asked who is missing, and has a moment for its answer. */
static ddl_status ddl__client_answer(ddl__client *c, ddl__record *out) {
    uint8_t head[DDL__RECORD_BYTES];
    if (!ddl__socket_wait(c->fd, POLLIN, c->deadline_ns)) {
        ddl__record_write(head, DDL__RECORD_GIVE_UP, DDL_OK, 0);
        (void)ddl__socket_send(c->fd, head, sizeof head, c->deadline_ns + DDL__LEAVE_NS);
    }
    int got = ddl__socket_all(c->fd, head, sizeof head, c->deadline_ns + DDL__LEAVE_NS);
    if (got < 0 && errno == ETIMEDOUT) {
        return ddl__fail(
            c->why, DDL_ERR_TIMEOUT,
            "ddl_init: rank %d of %d has come to rank 0 at %s, but not all others have within %lld ms, and rank 0 "
            "does not answer",
            c->settings->launch.rank, c->settings->launch.world, c->where, (long long)c->settings->init_timeout_ms);
    }
    if (got != 1) {
        return ddl__client_lost(c);
    }
    *out = ddl__record_read(head);
    return DDL_OK;
}

/* Proven: gives the blob, takes the table. */
static ddl_status ddl__client_trade(ddl__client *c) {
    uint8_t head[DDL__RECORD_BYTES];
    ddl__record answer;
    size_t bytes = (size_t)c->settings->launch.world * c->blob_bytes;
    ddl__record_write(head, DDL__RECORD_BLOB, DDL_OK, c->blob_bytes);
    if (!ddl__socket_send(c->fd, head, sizeof head, c->deadline_ns) ||
        !ddl__socket_send(c->fd, c->blob, c->blob_bytes, c->deadline_ns)) {
        return ddl__client_again(c, "the connection broke off: %s", strerror(errno));
    }
    DDL__TRY(ddl__client_answer(c, &answer));
    if (answer.kind == DDL__RECORD_FAILED) {
        return ddl__client_failed(c, &answer, ddl__now_ns() + DDL__LEAVE_NS);
    }
    if (!ddl__record_is_table(&answer, c->settings->launch.world, c->blob_bytes)) {
        return ddl__fail(c->why, DDL_ERR_CORRUPT, "ddl_init: the answer of rank 0 at %s makes no sense", c->where);
    }
    if (ddl__socket_all(c->fd, c->table, bytes, ddl__now_ns() + DDL__DELIVER_NS) != 1) {
        return ddl__client_lost(c);
    }
    ddl__record_write(head, DDL__RECORD_TAKEN, DDL_OK, 0);
    (void)ddl__socket_send(c->fd, head, sizeof head, ddl__now_ns() + DDL__LEAVE_NS);
    return DDL_OK;
}

static int ddl__connect_at(const ddl__address *a, uint64_t until_ns) {
    int fd = socket(a->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0, yes = 1;
    socklen_t bytes = sizeof error;
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, &a->at.any, a->bytes) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            if (ddl__socket_wait(fd, POLLOUT, until_ns)) {
                (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
            }
        }
    }
    if (error != 0) {
        close(fd);
        errno = error;
        return -1;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); /* fails on a unix socket, which has no delay */
    return fd;
}

/* One connection, from its beginning to its end. DDL_IN_PROGRESS: come again. */
static ddl_status ddl__client_try(ddl__client *c, const ddl__address *a) {
    bool by_uid = a->at.any.sa_family == AF_UNIX;
    c->fd = ddl__connect_at(a, DDL__MIN(c->deadline_ns, ddl__now_ns() + DDL__CONNECT_NS));
    if (c->fd < 0) {
        bool over = errno == ETIMEDOUT && ddl__now_ns() >= c->deadline_ns; /* our time is, nothing is learnt */
        return over && c->last[0] != 0 ? DDL_IN_PROGRESS : ddl__client_again(c, "%s", strerror(errno));
    }
    ddl_status status;
    if (by_uid && ddl__socket_uid(c->fd) != (long)geteuid()) {
        status = ddl__client_refused(c, DDL_ERR_AUTH, "the unix socket there belongs to another user");
    } else {
        status = ddl__client_prove(c, by_uid);
    }
    if (status == DDL_OK) {
        status = ddl__client_trade(c);
    }
    close(c->fd);
    return status;
}

/* Every address and port that rank 0 may be at, once. */
static ddl_status ddl__client_round(ddl__client *c) {
    const ddl__settings *s = c->settings;
    ddl__addresses list;
    int error = ddl__resolve(s->place.host, &list);
    if (error != 0) {
        return ddl__client_again(c, "the name does not resolve: %s", gai_strerror(error));
    }
    if (ddl__place_is_here(s)) {
        if (!ddl__addresses_have_mine(&list)) {
            return ddl__no_secret_between_hosts(s, c->why);
        }
        ddl__address_of_unix(&list.list[0], s->place.port, s->job_id);
        list.count = 1;
    }
    ddl_status status = DDL_IN_PROGRESS;
    for (int32_t port = 0; port < s->place.ports && status == DDL_IN_PROGRESS; port++) {
        for (int i = 0; i < list.count && status == DDL_IN_PROGRESS; i++) {
            ddl__address_set_port(&list.list[i], s->place.port + port);
            status = ddl__client_try(c, &list.list[i]);
        }
    }
    return status;
}

/* What is most often wrong. */
static const char *ddl__client_hint(const ddl__client *c) {
    ddl__addresses list;
    if (c->settings->secret == NULL) {
        return "; this rank has no secret, so rank 0 must have none either";
    }
    bool loopback = ddl__resolve(c->settings->place.host, &list) == 0 && ddl__address_is_loopback(&list.list[0]);
    return loopback
               ? "; this is a loopback address, which leads only to processes of the same machine: with more machines, "
                 "give rank 0's address in the network"
               : "";
}

static ddl_status ddl__client_give_up(ddl__client *c) {
    const ddl__launch *l = &c->settings->launch;
    double waited = (double)(ddl__now_ns() - c->start_ns) / (double)DDL__NS_PER_S;
    if (c->refused_ns != 0) {
        return ddl__fail(
            c->why, c->refusal,
            "ddl_init: rank %d of %d finds no rank 0 of its job at %s: %s. Is MASTER_PORT free for this job alone, "
            "and the secret the same on all ranks",
            l->rank, l->world, c->where, c->refusal_text);
    }
    return ddl__fail(
        c->why, DDL_ERR_TIMEOUT,
        "ddl_init: rank %d of %d could not reach rank 0 at %s within %.1f s (last: %s). Look whether rank 0 is "
        "started and what it prints, and whether %s name its machine%s",
        l->rank, l->world, c->where, waited, c->last, c->settings->place.from, ddl__client_hint(c));
}

/* Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_AUTH, DDL_ERR_VERSION, DDL_ERR_CONFIG, DDL_ERR_PEER, and those that rank 0
 * reports. */
static ddl_status ddl__client_run(ddl__client *c) {
    const ddl__settings *s = c->settings;
    uint64_t pause_ms = 1;
    c->start_ns = ddl__now_ns();
    if (ddl__place_is_here(s)) {
        ddl__unix_text(s, c->where, sizeof c->where);
    } else {
        snprintf(c->where, sizeof c->where, strchr(s->place.host, ':') ? "[%.100s]:%d" : "%.100s:%d", s->place.host,
                 s->place.port);
    }
    for (;;) {
        ddl_status status = ddl__client_round(c);
        if (status != DDL_IN_PROGRESS) {
            return status;
        }
        uint64_t now = ddl__now_ns();
        bool taken = c->refused_ns != 0 && s->place.ports == 1 && now - c->refused_ns > DDL__REFUSED_NS;
        if (taken || now >= c->deadline_ns) {
            return ddl__client_give_up(c);
        }
        ddl__pause_ms(DDL__MIN(pause_ms, (c->deadline_ns - now) / DDL__NS_PER_MS + 1));
        pause_ms = DDL__MIN(pause_ms * 2, 100u);
    }
}

/* >>store/file */
/* file: the rendezvous through a folder that all ranks share, NFS included: no locks, no sockets; a file appears by
 * being renamed.
 *
 *     <folder>/ddl-<job>-<hash>/rank.<r>   written by rank r: its nonce, the table's nonce it has seen, its blob
 *     <folder>/ddl-<job>-<hash>/table      written by rank 0: its nonce, and of each rank the nonce and the blob
 *
 * Files of a run that died look like those of this one, the job's name does not tell them apart, and clocks differ. So
 * freshness is shown by echo. Rank 0 draws a nonce and puts up an empty table with it; a rank answers by writing that
 * nonce into its file beside its own. Rank 0 counts only files with its nonce: their writers live. A rank believes only
 * a table with its own nonce in its place: its writer has read the file of this run. When all have answered, rank 0
 * completes the table; its state tells whether it is open, complete or failed. Whoever misses its file writes it again,
 * so that a late clean-up of an earlier run does no harm.
 *
 *     0  magic "ddlf", version u16, state u16, world u32, blob bytes u32, job u64, nonce [16]
 *    40  rank's file: nonce of the table [16], blob
 *    40  table: text [1024], then of each rank: nonce [16], blob
 *    end HMAC-SHA256 of all before it; the key is the job secret, or empty: then it is a checksum
 */

#define DDL__FILE_MAGIC 0x666c6464u
#define DDL__FILE_HEAD 40
#define DDL__FILE_NONCE 16
#define DDL__FILE_MAC 32
#define DDL__FILE_VERSION 1
#define DDL__FILE_LINGER_NS (1 * DDL__NS_PER_S) /* of rank 0, for the others to take their files away */

enum ddl__file_state { DDL__FILE_RANK, DDL__FILE_OPEN, DDL__FILE_COMPLETE, DDL__FILE_FAILED };

typedef struct ddl__file {
    const ddl__settings *settings;
    ddl__base *base;
    ddl__sentence *why;
    size_t blob_bytes, slot_bytes, table_bytes; /* of a slot of the table, of the table's file */
    uint64_t start_ns, deadline_ns;
    int folder; /* descriptor of the job's folder */
    char path[1024], name[128];
    uid_t owner; /* of files that this process writes, as the file system sees it */
    uint8_t nonce[DDL__FILE_NONCE], seen[DDL__FILE_NONCE];
    ddl__hmac_key key;
    uint8_t *table, *scratch; /* both of table_bytes */
    uint8_t *ranks;           /* rank 0: enum ddl__rank_state */
} ddl__file;

static size_t ddl__file_rank_bytes(const ddl__file *f) {
    return DDL__FILE_HEAD + DDL__FILE_NONCE + f->blob_bytes + DDL__FILE_MAC;
}

static uint8_t *ddl__file_slot(const ddl__file *f, uint8_t *table, int32_t rank) {
    return table + DDL__FILE_HEAD + DDL__SENTENCE_BYTES + (size_t)rank * f->slot_bytes;
}

static void ddl__file_head(const ddl__file *f, uint16_t state, const uint8_t nonce[DDL__FILE_NONCE], uint8_t *out) {
    ddl__writer w = ddl__writer_of(out, DDL__FILE_HEAD);
    ddl__put_u32(&w, DDL__FILE_MAGIC);
    ddl__put_u16(&w, DDL__FILE_VERSION);
    ddl__put_u16(&w, state);
    ddl__put_u32(&w, (uint32_t)f->settings->launch.world);
    ddl__put_u32(&w, (uint32_t)f->blob_bytes);
    ddl__put_u64(&w, f->settings->job_id);
    ddl__put_bytes(&w, nonce, DDL__FILE_NONCE);
}

/* The label keeps one rank's file from serving as another's. */
static void ddl__file_mac(const ddl__file *f, const char *name, const uint8_t *bytes, size_t count, uint8_t out[32]) {
    ddl__sha256 h;
    ddl__hmac_begin(&h, &f->key);
    ddl__sha256_update(&h, name, strlen(name) + 1);
    ddl__sha256_update(&h, bytes, count);
    ddl__hmac_end(&h, &f->key, out);
}

static ddl_status ddl__file_error(const ddl__file *f, const char *what) {
    return ddl__fail(f->why, DDL_ERR_SYSTEM, "ddl_init: rank %d cannot %s in %.300s/%s (%s): %s",
                     f->settings->launch.rank, what, f->path, f->name, f->settings->place.from, strerror(errno));
}

static bool ddl__file_put(int fd, const uint8_t *bytes, size_t count) {
    while (count > 0) {
        ssize_t n = write(fd, bytes, count);
        if (n < 0 && errno != EINTR) {
            return false;
        }
        bytes += n > 0 ? n : 0;
        count -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* Opens the job's folder, and makes it when it is not there (or not any more). */
static ddl_status ddl__file_open_folder(ddl__file *f) {
    int parent = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) {
        return ddl__file_error(f, "open the folder");
    }
    int folder = -1;
    if (mkdirat(parent, f->name, 0700) == 0 || errno == EEXIST) {
        folder = openat(parent, f->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    int error = errno;
    close(parent);
    if (f->folder >= 0) {
        close(f->folder);
    }
    f->folder = folder;
    errno = error;
    return folder >= 0 ? DDL_OK : ddl__file_error(f, "make a folder");
}

/* Writes a file whole or not at all. bytes has room for the MAC at its end. */
static ddl_status ddl__file_write(ddl__file *f, const char *name, uint8_t *bytes, size_t count) {
    char temporary[64];
    struct stat info;
    snprintf(temporary, sizeof temporary, ".%s.%02x%02x%02x%02x", name, f->nonce[0], f->nonce[1], f->nonce[2],
             f->nonce[3]);
    ddl__file_mac(f, name, bytes, count - DDL__FILE_MAC, bytes + count - DDL__FILE_MAC);
    for (int tries = 0; tries < 3; tries++) {
        int fd = openat(f->folder, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
        bool done = fd >= 0 && ddl__file_put(fd, bytes, count) && fstat(fd, &info) == 0;
        if (fd >= 0) {
            done = close(fd) == 0 && done; /* NFS reports a full disk here */
        }
        if (done && renameat(f->folder, temporary, f->folder, name) == 0) {
            f->owner = info.st_uid;
            return DDL_OK;
        }
        if (errno != ENOENT && errno != ESTALE) {
            break;
        }
        DDL__TRY(ddl__file_open_folder(f)); /* somebody cleaned up under us */
    }
    ddl_status status = ddl__file_error(f, "write a file");
    (void)unlinkat(f->folder, temporary, 0);
    return status;
}

/* Whether a file's bytes are whole and of this job's. */
static bool ddl__file_genuine(const ddl__file *f, const char *name, const uint8_t *bytes, size_t count) {
    uint8_t mac[DDL__FILE_MAC];
    ddl__file_mac(f, name, bytes, count - DDL__FILE_MAC, mac);
    return ddl__ct_equal(mac, bytes + count - DDL__FILE_MAC, sizeof mac) && ddl__load_le32(bytes) == DDL__FILE_MAGIC;
}

/* Reads a file of exactly count bytes into out. False: not there, or not what it should be. Without a secret the owner
 * vouches for the content. */
static bool ddl__file_read(const ddl__file *f, const char *name, uint8_t *out, size_t count) {
    int fd = openat(f->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0) {
        return false;
    }
    size_t have = 0;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size == (off_t)count &&
        (info.st_uid == f->owner || f->settings->secret != NULL)) {
        ssize_t n = 1;
        while (have < count && n > 0) {
            n = read(fd, out + have, count - have);
            have += n > 0 ? (size_t)n : 0;
        }
    }
    close(fd);
    return have == count && ddl__file_genuine(f, name, out, count);
}

/* The head alone, not checked: to see whether the file is worth reading again. A table is long, and so is its MAC. */
static bool ddl__file_peek(const ddl__file *f, const char *name, uint8_t out[DDL__FILE_HEAD]) {
    int fd = openat(f->folder, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return false;
    }
    ssize_t n = read(fd, out, DDL__FILE_HEAD);
    close(fd);
    return n == DDL__FILE_HEAD;
}

/* The head of a file that was read: its state, or -1 when it is of another job, world or version. */
static int ddl__file_state(const ddl__file *f, const uint8_t *bytes) {
    ddl__reader r = ddl__reader_of(bytes + 4, DDL__FILE_HEAD - 4);
    uint16_t version = ddl__get_u16(&r), state = ddl__get_u16(&r);
    bool same = version == DDL__FILE_VERSION && ddl__get_u32(&r) == (uint32_t)f->settings->launch.world;
    same = ddl__get_u32(&r) == f->blob_bytes && same;
    same = ddl__get_u64(&r) == f->settings->job_id && same;
    return same ? state : -1;
}

/* NFS may serve a name that it looked up before for half a minute; opening the folder makes it ask again. */
static void ddl__file_refresh(const ddl__file *f) {
    int fd = openat(f->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
}

static ddl_status ddl__file_put_table(ddl__file *f, uint16_t state) {
    ddl__file_head(f, state, f->nonce, f->table);
    return ddl__file_write(f, "table", f->table, f->table_bytes);
}

/* Rank 0: takes in the blob of a rank whose file bears our nonce. False: it is of another run. */
static bool ddl__file_admit(ddl__file *f, int32_t rank, const uint8_t *in) {
    if (ddl__file_state(f, in) != DDL__FILE_RANK || memcmp(in + DDL__FILE_HEAD, f->nonce, DDL__FILE_NONCE) != 0) {
        return false;
    }
    uint8_t *slot = ddl__file_slot(f, f->table, rank);
    memcpy(slot, in + 24, DDL__FILE_NONCE);
    memcpy(slot + DDL__FILE_NONCE, in + DDL__FILE_HEAD + DDL__FILE_NONCE, f->blob_bytes);
    return true;
}

/* Rank 0: takes in all that have answered. Returns how many are here. A restarted rank replaces itself. */
static int32_t ddl__file_collect(ddl__file *f) {
    char name[32];
    int32_t here = 1;
    for (int32_t r = 1; r < f->settings->launch.world; r++) {
        snprintf(name, sizeof name, "rank.%d", r);
        bool fresh = ddl__file_read(f, name, f->scratch, ddl__file_rank_bytes(f)) && ddl__file_admit(f, r, f->scratch);
        f->ranks[r] = fresh ? DDL__RANK_HERE : DDL__RANK_AWAY;
        here += fresh;
    }
    return here;
}

/* Rank 0 gives up: the sentence goes into the table, for those who are here. */
static ddl_status ddl__file_fail(ddl__file *f) {
    ddl__text text = {f->why->text, sizeof f->why->text, 0};
    int32_t here = ddl__file_collect(f), world = f->settings->launch.world;
    ddl__text_add(&text, "ddl_init: ");
    ddl__text_ranks_below(&text, f->ranks, world, DDL__RANK_HERE);
    ddl__text_add(
        &text,
        " of %d %s not come within %.1f s to %.300s/%s. Look at what the missing ranks print; they need the same "
        "folder, job and secret as the others",
        world, world - here == 1 ? "has" : "have", (double)(ddl__now_ns() - f->start_ns) / (double)DDL__NS_PER_S,
        f->path, f->name);
    f->why->status = DDL_ERR_TIMEOUT;
    memcpy(f->table + DDL__FILE_HEAD, f->why->text, DDL__SENTENCE_BYTES);
    ddl__sentence kept = *f->why;
    (void)ddl__file_put_table(f, DDL__FILE_FAILED);
    *f->why = kept;
    return f->why->status;
}

static uint64_t ddl__file_pause(uint64_t ms) {
    ddl__pause_ms(ms);
    return DDL__MIN(ms * 2, 50u);
}

/* Whoever is last takes the table away, and the folder: a rank that has its own file there still wants to read. nonce
 * is the table's: a new run may have put up its own. What stays when a rank dies here harms nobody. */
static void ddl__file_clean(ddl__file *f, const uint8_t nonce[DDL__FILE_NONCE]) {
    char name[32];
    uint8_t head[DDL__FILE_HEAD];
    struct stat info;
    for (int32_t r = 1; r < f->settings->launch.world; r++) {
        snprintf(name, sizeof name, "rank.%d", r);
        if (fstatat(f->folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
            return;
        }
    }
    if (ddl__file_peek(f, "table", head) && memcmp(head + 24, nonce, DDL__FILE_NONCE) == 0) {
        (void)unlinkat(f->folder, "table", 0);
    }
    int parent = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent >= 0) {
        (void)unlinkat(parent, f->name, AT_REMOVEDIR); /* refused while somebody's file is in it */
        close(parent);
    }
}

/* Rank 0 stays for a moment, so that as a rule the place is empty when it goes on. */
static void ddl__file_linger(ddl__file *f) {
    uint64_t until = ddl__now_ns() + DDL__FILE_LINGER_NS, pause = 1;
    while (ddl__file_collect(f) > 1 && ddl__now_ns() < until) {
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
    }
    ddl__file_clean(f, f->nonce);
}

static ddl_status ddl__file_lead(ddl__file *f, uint8_t *blobs) {
    int32_t world = f->settings->launch.world;
    uint64_t pause = 1;
    uint8_t head[DDL__FILE_HEAD];
    memcpy(ddl__file_slot(f, f->table, 0) + DDL__FILE_NONCE, blobs, f->blob_bytes);
    DDL__TRY(ddl__file_put_table(f, DDL__FILE_OPEN));
    while (ddl__file_collect(f) < world) {
        if (ddl__now_ns() >= f->deadline_ns) {
            return ddl__file_fail(f);
        }
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
        if (!ddl__file_peek(f, "table", head) || memcmp(head + 24, f->nonce, DDL__FILE_NONCE) != 0) {
            DDL__TRY(ddl__file_put_table(f, DDL__FILE_OPEN)); /* an earlier run cleaned up late */
        }
    }
    DDL__TRY(ddl__file_put_table(f, DDL__FILE_COMPLETE));
    for (int32_t r = 1; r < world; r++) {
        memcpy(blobs + (size_t)r * f->blob_bytes, ddl__file_slot(f, f->table, r) + DDL__FILE_NONCE, f->blob_bytes);
    }
    ddl__file_linger(f);
    return DDL_OK;
}

/* A rank writes its file when there is a table to answer, and when the file is not there. */
static ddl_status ddl__file_answer(ddl__file *f, const char *name, const uint8_t *blob, bool *written) {
    uint8_t bytes[DDL__FILE_HEAD + DDL__FILE_NONCE + DDL__BLOB_MAX + DDL__FILE_MAC];
    size_t count = ddl__file_rank_bytes(f);
    if (*written && ddl__file_read(f, name, bytes, count) && memcmp(bytes + 24, f->nonce, DDL__FILE_NONCE) != 0 &&
        memcmp(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE) == 0) {
        return ddl__fail(
            f->why, DDL_ERR_CONFIG,
            "ddl_init: another process has come as rank %d to %.300s/%s; every rank is started once, with its "
            "own RANK, and jobs that run at the same time need different DDL_JOB",
            f->settings->launch.rank, f->path, f->name);
    }
    if (*written && ddl__file_read(f, name, bytes, count) &&
        memcmp(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE) == 0) {
        return DDL_OK;
    }
    ddl__file_head(f, DDL__FILE_RANK, f->nonce, bytes);
    memcpy(bytes + DDL__FILE_HEAD, f->seen, DDL__FILE_NONCE);
    memcpy(bytes + DDL__FILE_HEAD + DDL__FILE_NONCE, blob, f->blob_bytes);
    DDL__TRY(ddl__file_write(f, name, bytes, count));
    *written = true;
    return DDL_OK;
}

/* The table that was read into f->table concerns this run when our nonce is in our place. DDL_IN_PROGRESS: not yet. */
static ddl_status ddl__file_take(ddl__file *f, uint8_t *blobs) {
    int state = ddl__file_state(f, f->table);
    const uint8_t *mine = ddl__file_slot(f, f->table, f->settings->launch.rank);
    if (memcmp(mine, f->nonce, DDL__FILE_NONCE) != 0 || (state != DDL__FILE_COMPLETE && state != DDL__FILE_FAILED)) {
        return DDL_IN_PROGRESS;
    }
    if (state == DDL__FILE_FAILED) {
        char *text = (char *)f->table + DDL__FILE_HEAD;
        text[DDL__SENTENCE_BYTES - 1] = 0;
        ddl__text_clean(text);
        return ddl__fail(f->why, DDL_ERR_TIMEOUT, "%s", text[0] != 0 ? text : "ddl_init: rank 0 gave up");
    }
    for (int32_t r = 0; r < f->settings->launch.world; r++) {
        memcpy(blobs + (size_t)r * f->blob_bytes, ddl__file_slot(f, f->table, r) + DDL__FILE_NONCE, f->blob_bytes);
    }
    return DDL_OK;
}

static ddl_status ddl__file_overdue(ddl__file *f, const char *name, bool written) {
    (void)unlinkat(f->folder, name, 0);
    return ddl__fail(
        f->why, DDL_ERR_TIMEOUT,
        "ddl_init: rank %d of %d waited %.1f s at %.300s/%s, but %s. Look at what rank 0 prints, and whether all "
        "ranks have the same folder, job and secret",
        f->settings->launch.rank, f->settings->launch.world,
        (double)(ddl__now_ns() - f->start_ns) / (double)DDL__NS_PER_S, f->path, f->name,
        written ? "rank 0 did not complete the table" : "rank 0 has not come");
}

/* Rank 0 speaks first at the deadline: it knows who is missing. */
static ddl_status ddl__file_follow(ddl__file *f, uint8_t *blobs) {
    char name[32];
    uint8_t head[DDL__FILE_HEAD];
    bool written = false, known = false; /* known: there is a table to answer */
    uint64_t pause = 1;
    const uint8_t *blob = blobs + (size_t)f->settings->launch.rank * f->blob_bytes;
    snprintf(name, sizeof name, "rank.%d", f->settings->launch.rank);
    for (;;) {
        bool there = ddl__file_peek(f, "table", head);
        bool news = there && memcmp(head, f->table, sizeof head) != 0;
        bool whole = news && ddl__file_read(f, "table", f->table, f->table_bytes);
        if (news && !whole) {
            memset(f->table, 0, sizeof head); /* so that it is news again */
        }
        if (whole && ddl__file_state(f, f->table) >= 0) {
            ddl_status status = ddl__file_take(f, blobs);
            if (status != DDL_IN_PROGRESS) {
                (void)unlinkat(f->folder, name, 0);
                ddl__file_clean(f, f->table + 24); /* when this rank is the last */
                return status;
            }
            memcpy(f->seen, f->table + 24, DDL__FILE_NONCE);
            known = true;
        }
        if (known) {
            DDL__TRY(ddl__file_answer(f, name, blob, &written));
        }
        if (ddl__now_ns() >= f->deadline_ns + DDL__LEAVE_NS) {
            return ddl__file_overdue(f, name, written);
        }
        pause = ddl__file_pause(pause);
        ddl__file_refresh(f);
    }
}

/* The folder's name: readable, and safe whatever the job is called. */
static void ddl__file_name(ddl__file *f) {
    const char *job = f->settings->job != NULL ? f->settings->job : "default";
    char clean[41];
    size_t n = 0;
    for (; job[n] != 0 && n < sizeof clean - 1; n++) {
        char c = job[n];
        bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
        clean[n] = plain ? c : '_';
    }
    clean[n] = 0;
    snprintf(f->name, sizeof f->name, "ddl-%s-%016" PRIx64, clean, f->settings->job_id);
}

static ddl_status ddl__file_run(ddl__file *f, uint8_t *blobs) {
    const ddl__settings *s = f->settings;
    f->table = ddl__alloc(f->base, f->table_bytes);
    f->scratch = ddl__alloc(f->base, DDL__MAX(f->table_bytes, ddl__file_rank_bytes(f)));
    f->ranks = ddl__alloc(f->base, (size_t)s->launch.world);
    if (f->table == NULL || f->scratch == NULL || f->ranks == NULL) {
        return ddl__fail(f->why, DDL_ERR_NOMEM, "ddl_init: no memory for the table of %d ranks", s->launch.world);
    }
    if (ddl__random(f->nonce, sizeof f->nonce) != DDL_OK) {
        return ddl__fail(f->why, DDL_ERR_SYSTEM, "ddl_init: the kernel gives no random bytes: %s", strerror(errno));
    }
    ddl__hmac_key_init(&f->key, s->secret, s->secret_bytes);
    f->owner = geteuid();
    f->ranks[0] = DDL__RANK_HERE;
    DDL__TRY(ddl__file_open_folder(f));
    return s->launch.rank == 0 ? ddl__file_lead(f, blobs) : ddl__file_follow(f, blobs);
}

/* blobs holds this rank's own already. Blocks. Errors: DDL_ERR_TIMEOUT, DDL_ERR_CONFIG, DDL_ERR_SYSTEM,
 * DDL_ERR_NOMEM. */
static ddl_status ddl__file_rendezvous(const ddl__settings *s, ddl__base *base, size_t bytes, uint8_t *blobs,
                                       uint64_t deadline_ns, ddl__sentence *why) {
    ddl__file f = {.settings = s, .base = base, .why = why, .blob_bytes = bytes, .folder = -1};
    f.start_ns = ddl__now_ns();
    f.deadline_ns = deadline_ns;
    f.slot_bytes = DDL__FILE_NONCE + bytes;
    f.table_bytes = DDL__FILE_HEAD + DDL__SENTENCE_BYTES + (size_t)s->launch.world * f.slot_bytes + DDL__FILE_MAC;
    snprintf(f.path, sizeof f.path, "%s", s->place.folder);
    ddl__file_name(&f);
    ddl_status status = ddl__file_run(&f, blobs);
    if (f.folder >= 0) {
        close(f.folder);
    }
    ddl__wipe(&f.key, sizeof f.key);
    ddl__free(base, f.table);
    ddl__free(base, f.scratch);
    ddl__free(base, f.ranks);
    return status;
}

/* >>store */
/* store: the rendezvous. Every rank brings a blob of one size, every rank leaves with the blobs of all. It happens
 * once, at the start; nothing of it is left afterwards, so that no process is special from then on. */

static ddl_status ddl__rendezvous_tcp(const ddl__settings *s, ddl__base *base, const void *blob, size_t bytes,
                                      uint8_t *table, uint64_t deadline_ns, uint64_t *strangers, ddl__sentence *why) {
    if (s->launch.rank != 0) {
        ddl__client client = {.settings = s,
                              .base = base,
                              .blob = blob,
                              .blob_bytes = bytes,
                              .table = table,
                              .fd = -1,
                              .deadline_ns = deadline_ns,
                              .why = why};
        return ddl__client_run(&client);
    }
    ddl__server server = {.settings = s, .base = base, .blob_bytes = bytes, .table = table, .why = why};
    DDL__TRY(ddl__need_fds(s->launch.world + DDL__STRANGERS_MAX + 16, why));
    DDL__TRY(ddl__listen(&server));
    ddl_status status = ddl__server_serve(&server, deadline_ns);
    *strangers = server.strangers;
    return status;
}

static ddl_status ddl__rendezvous_exchange(const ddl__settings *s, const void *blob, size_t bytes, void *table,
                                           ddl__sentence *why) {
    int result = s->exchange(s->exchange_user, blob, table, bytes);
    return result == 0 ? DDL_OK
                       : ddl__fail(why, DDL_ERR_SYSTEM,
                                   "ddl_init: the exchange function of ddl_config returned %d on rank %d of %d", result,
                                   s->launch.rank, s->launch.world);
}

/* All-gathers bytes <= DDL__BLOB_MAX from every rank: rank r's blob is at out_table + r * bytes. All ranks call it with
 * the same bytes. Blocks, at most about init_timeout_ms. *out_strangers: connections that could not prove that they
 * belong here, where there is a server. On error the table's content is not defined, and every rank that can be reached
 * has the same sentence. */
static ddl_status ddl__rendezvous(const ddl__settings *s, ddl__base *base, const void *blob, size_t bytes,
                                  void *out_table, uint64_t *out_strangers, ddl__sentence *why) {
    uint64_t deadline = ddl__deadline(ddl__now_ns(), s->init_timeout_ms);
    *out_strangers = 0;
    if (bytes == 0 || bytes > DDL__BLOB_MAX || (uint64_t)s->launch.world * bytes > UINT32_MAX) {
        return ddl__fail(why, DDL_ERR_INTERNAL,
                         "ddl_init: a rendezvous of %zu bytes from each of %d ranks is not possible", bytes,
                         s->launch.world);
    }
    memcpy((uint8_t *)out_table + (size_t)s->launch.rank * bytes, blob, bytes);
    switch (s->place.kind) {
    case DDL__MEET_ALONE:
        return DDL_OK;
    case DDL__MEET_EXCHANGE:
        return ddl__rendezvous_exchange(s, blob, bytes, out_table, why);
    case DDL__MEET_FILE:
        return ddl__file_rendezvous(s, base, bytes, out_table, deadline, why);
    default:
        return ddl__rendezvous_tcp(s, base, blob, bytes, out_table, deadline, out_strangers, why);
    }
}

/* >>tcp/link */
/* tcp, first part: one connection. Bytes in, cut into frames; messages out, joined into few system calls.
 * It knows the host table and sockets; it must not know how connections come about (endpoint.h) or what frames mean. */

enum {
    DDL__TCP_STAGE_BYTES = 68 * 1024, /* read ahead of this much; small frames are handed on from here */
    DDL__TCP_SPARE_BYTES = 2048,      /* read behind a large payload: the next header, little to copy */
    DDL__TCP_BATCH = 16,              /* messages joined into one sendmsg */
    DDL__TCP_READS = 32               /* reads from one connection before others get their turn */
};

typedef enum ddl__tcp_state {
    DDL__TCP_CONNECTING = 1, /* connect() has not ended */
    DDL__TCP_PROVING = 2,    /* handshake */
    DDL__TCP_CHANNEL = 3,    /* proven: the client says what for ("D" data, "C" control), the server "G" for go */
    DDL__TCP_READY = 4
} ddl__tcp_state;

typedef struct ddl__tcp_conn {
    int fd;
    int32_t peer; /* -1 while a stranger */
    ddl__tcp_state state;
    bool is_client;
    bool is_control; /* carries no data: keepalive on it notices a cut link, see endpoint.h */
    bool writing;    /* EPOLLOUT is asked for */
    bool bulk;       /* the last payload was large: do not read far ahead of the next header */
    void *proof;     /* state of host->prove */
    uint64_t since_ns;
    struct ddl__tcp_conn *next; /* strangers, oldest first */
    uint8_t head[DDL__FRAME_BYTES]; /* of a frame whose header has come in part */
    uint32_t head_bytes;
    uint8_t *landing; /* where the rest of the current payload goes */
    uint64_t landing_left;
    void *token;
    bool acks;     /* acknowledges while it waits: see ddl__tcp_acknowledge */
    bool owes_ack; /* has read since it last wrote */
    bool cut; /* what is landing has no place any more: read nothing, the connection ends */
} ddl__tcp_conn;

/* What is known of one rank. Messages wait here, so that they outlive an attempt to connect. */
typedef struct ddl__tcp_peer {
    ddl__tcp_conn *data, *control;
    ddl_message *first, *last;
    ddl_message *done; /* left the queue, to be reported */
    ddl_message *orphan; /* the first one is a copy of ours, whose owner has taken the original back */
    uint64_t first_sent; /* bytes of *first that are gone, header included */
    struct sockaddr_storage address;
    socklen_t address_bytes;
    bool reachable, same_host, dead, backlogged;
    bool wanted; /* asked for by connect, also while there is nothing to send */
    bool lost; /* a connection that was ready broke: what was in it is gone, a second one would have a gap */
    bool ending; /* its control connection has ended: if no data comes either, it has */
    uint64_t trying_ns; /* when the first attempt to connect began; 0: connected, or never tried */
    uint64_t retry_ns;  /* 0: no retry is due */
} ddl__tcp_peer;

typedef struct ddl__tcp {
    const ddl_host *host;
    ddl_transport_params params;
    int listen_fd, epoll_fd;
    ddl__tcp_peer *peers;
    ddl__tcp_conn *strangers;
    int32_t stranger_count, retry_count, backlog_count, misses;
    int32_t *backlog; /* peers with messages that wait for the socket */
    struct sockaddr_storage bound;
    socklen_t bound_bytes;
    char congestion[32]; /* the system's congestion control */
    uint8_t stage[DDL__TCP_STAGE_BYTES + DDL__FRAME_BYTES];
} ddl__tcp;

static void ddl__tcp_log(ddl__tcp *t, ddl_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void ddl__tcp_log(ddl__tcp *t, ddl_log_level level, const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    t->host->log(t->host, level, line);
}

static void ddl__tcp_watch(ddl__tcp *t, ddl__tcp_conn *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data = {.ptr = c}};
    epoll_ctl(t->epoll_fd, operation, c->fd, &event);
}

static void ddl__tcp_want_write(ddl__tcp *t, ddl__tcp_conn *c, bool want) {
    if (c->writing != want) {
        c->writing = want;
        ddl__tcp_watch(t, c, EPOLL_CTL_MOD, want ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
}

/* >>out */

static uint64_t ddl__tcp_message_bytes(const ddl_message *m) { return DDL_MESSAGE_HEADER_BYTES + m->payload_bytes; }

/* The unsent bytes of up to DDL__TCP_BATCH messages from the queue as an iovec; returns its length. */
static int ddl__tcp_gather(const ddl__tcp_peer *p, struct iovec *iov) {
    int n = 0;
    uint64_t skip = p->first_sent;
    for (ddl_message *m = p->first; m != NULL && n + 2 <= 2 * DDL__TCP_BATCH; m = m->next) {
        if (skip < DDL_MESSAGE_HEADER_BYTES) {
            iov[n++] = (struct iovec){m->header + skip, DDL_MESSAGE_HEADER_BYTES - skip};
            skip = 0;
        } else {
            skip -= DDL_MESSAGE_HEADER_BYTES;
        }
        if (m->payload_bytes > skip) {
            iov[n++] = (struct iovec){(char *)(uintptr_t)m->payload + skip, m->payload_bytes - skip};
        }
        skip = 0;
    }
    return n;
}

static ssize_t ddl__tcp_sendmsg(ddl__tcp_conn *c, struct iovec *iov, int count) {
    c->owes_ack = false;
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};
    ssize_t n;
    do {
        n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n;
}

static void ddl__tcp_sent(ddl__tcp *t, ddl__tcp_peer *p, ddl_message *m, ddl_status status) {
    if (m == p->orphan) {
        p->orphan = NULL;
        t->host->free(t->host, m);
    } else {
        t->host->sent(t->host, m, status);
    }
}

/* Reports messages that left the queue. sent() may recall others of them, or send more: each is off the list before. */
static void ddl__tcp_report(ddl__tcp *t, ddl__tcp_peer *p, ddl_status status) {
    while (p->done != NULL) {
        ddl_message *m = p->done;
        p->done = m->next;
        ddl__tcp_sent(t, p, m, status);
    }
}

/* Takes a message that is recalled off the list of those that wait to be reported. */
static bool ddl__tcp_unlist(ddl_message **at, const ddl_message *m) {
    while (*at != NULL && *at != m) {
        at = &(*at)->next;
    }
    bool found = *at != NULL;
    if (found) {
        *at = m->next;
    }
    return found;
}

/* Takes messages that are wholly sent off the queue. sent() may append to the queue, so it is called last. */
static void ddl__tcp_account(ddl__tcp *t, ddl__tcp_peer *p, uint64_t bytes) {
    ddl_message **end = &p->done;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    p->first_sent += bytes;
    while (p->first != NULL && p->first_sent >= ddl__tcp_message_bytes(p->first)) {
        ddl_message *m = p->first;
        p->first_sent -= ddl__tcp_message_bytes(m);
        p->first = m->next;
        p->last = p->first == NULL ? NULL : p->last;
        m->next = NULL;
        *end = m;
        end = &m->next;
    }
    ddl__tcp_report(t, p, DDL_OK);
}

/* Writes what the socket takes. Returns 0, or the errno that the connection broke with. */
static int ddl__tcp_flush(ddl__tcp *t, ddl__tcp_peer *p) {
    while (p->first != NULL) {
        struct iovec iov[2 * DDL__TCP_BATCH];
        ssize_t n = ddl__tcp_sendmsg(p->data, iov, ddl__tcp_gather(p, iov));
        if (n < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) {
                return 0;
            }
            return errno;
        }
        ddl__tcp_account(t, p, (uint64_t)n);
    }
    return 0;
}

/* The common case: nothing waits, and the socket takes the whole message at once. Returns the bytes that went. */
static ssize_t ddl__tcp_send_now(ddl__tcp_peer *p, const ddl_message *m) {
    struct iovec iov[2] = {{(char *)(uintptr_t)m->header, DDL_MESSAGE_HEADER_BYTES},
                           {(char *)(uintptr_t)m->payload, m->payload_bytes}};
    return ddl__tcp_sendmsg(p->data, iov, m->payload_bytes > 0 ? 2 : 1);
}

/* Ends all waiting messages with an error. */
static void ddl__tcp_drop(ddl__tcp *t, ddl__tcp_peer *p, ddl_status status) {
    ddl__tcp_report(t, p, DDL_OK);
    p->done = p->first;
    p->first = p->last = NULL;
    p->first_sent = 0;
    ddl__tcp_report(t, p, status);
}

/* >>in */

/* Hands on the frames that lie whole in data; what remains begins a header or a landing. Returns 0 or an errno. */
static int ddl__tcp_cut(ddl__tcp *t, ddl__tcp_conn *c, const uint8_t *data, size_t bytes) {
    while (bytes >= DDL__FRAME_BYTES) {
        uint64_t payload;
        if (t->host->measure(t->host, c->peer, data, &payload) < 0) {
            return EBADMSG;
        }
        const uint8_t *header = data;
        data += DDL__FRAME_BYTES;
        bytes -= DDL__FRAME_BYTES;
        c->bulk = payload >= DDL__TCP_STAGE_BYTES;
        if (bytes >= payload) {
            if (t->host->deliver(t->host, c->peer, header, data, payload) < 0) {
                return EBADMSG;
            }
            data += payload;
            bytes -= payload;
            continue;
        }
        void *landing;
        if (t->host->land(t->host, c->peer, header, &payload, &landing, &c->token) < 0) {
            return EBADMSG;
        }
        c->landing = landing;
        memcpy(c->landing, data, bytes);
        c->landing += bytes;
        c->landing_left = payload - bytes;
        bytes = 0;
    }
    if (bytes > 0) {
        memcpy(c->head, data, bytes);
    }
    c->head_bytes = (uint32_t)bytes;
    return 0;
}

/* One read: first the rest of the current payload where it belongs, then ahead into the stage. Returns the bytes read,
 * 0 at the end of the stream, -1 with errno. */
static ssize_t ddl__tcp_readv(ddl__tcp *t, ddl__tcp_conn *c, size_t *out_asked) {
    struct iovec iov[2];
    int n = 0;
    if (c->landing_left > 0) {
        iov[n++] = (struct iovec){c->landing, c->landing_left};
    }
    size_t ahead = c->bulk ? DDL__TCP_SPARE_BYTES : DDL__TCP_STAGE_BYTES;
    iov[n++] = (struct iovec){t->stage + c->head_bytes, ahead};
    *out_asked = (size_t)c->landing_left + ahead;
    ssize_t got;
    do {
        got = n == 1 ? recv(c->fd, iov[0].iov_base, iov[0].iov_len, MSG_DONTWAIT) : readv(c->fd, iov, n);
    } while (got < 0 && errno == EINTR);
    return got;
}

/* Two small messages in a row make the kernel acknowledge inside the read of the second, which then takes as long as a
 * send. A rank that has a core to itself and waits anyway acknowledges the first before the second comes. */
static void ddl__tcp_acknowledge(ddl__tcp_conn *c) {
    if (c->acks && c->owes_ack) {
        int now_only = 2; /* even: further ones may be delayed again */
        c->owes_ack = false;
        setsockopt(c->fd, IPPROTO_TCP, TCP_QUICKACK, &now_only, sizeof now_only);
    }
}

/* Reads until nothing is there. *out_error: 0, an errno, or -1 for the end of the stream. Returns how many reads
 * brought something. */
static int ddl__tcp_read(ddl__tcp *t, ddl__tcp_conn *c, int *out_error) {
    int events = 0;
    *out_error = 0;
    while (events < DDL__TCP_READS) {
        if (c->cut) {
            *out_error = ENOMEM;
            return events;
        }
        size_t asked;
        ssize_t got = ddl__tcp_readv(t, c, &asked);
        if (got <= 0) {
            bool empty = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
            *out_error = got == 0 ? -1 : empty ? 0 : errno;
            ddl__tcp_acknowledge(c);
            return events;
        }
        events++;
        c->owes_ack = true;
        size_t landed = DDL__MIN((size_t)got, (size_t)c->landing_left);
        if (c->landing_left > 0) {
            c->landing += landed;
            c->landing_left -= landed;
            if (c->landing_left == 0) {
                t->host->landed(t->host, c->peer, c->token, DDL_OK);
                c->token = NULL;
            }
        }
        size_t rest = (size_t)got - landed;
        if (rest > 0) {
            memcpy(t->stage, c->head, c->head_bytes);
            *out_error = ddl__tcp_cut(t, c, t->stage, c->head_bytes + rest);
            if (*out_error != 0) {
                return events;
            }
        }
        if ((size_t)got < asked) {
            return events; /* the socket is empty: asking again would only cost a call */
        }
    }
    return events;
}

/* >>tcp/endpoint */
/* tcp, second part: listening, connecting, proving who is there; the transport table.
 *
 * Connections are made at first use, by whoever sends first; when two ranks connect to each other at once, the one of
 * the lower rank stays. Without a job secret, ranks of one host use unix sockets in the abstract namespace (no file is
 * left behind) whose other end must have the same uid. Between hosts each pair has a second, silent connection: on it
 * keepalive and TCP_USER_TIMEOUT notice a cut link in 4 s, while a peer that is only stopped still answers (on a
 * connection with data the user timeout would take a full window of a stopped peer for a cut link). */

enum {
    DDL__TCP_STRANGERS_MAX = 64,
    DDL__TCP_EPOLL_EVERY = 8 /* polls of the expected peer for each look at all the others */
};
#define DDL__TCP_PROOF_NS (5 * DDL__NS_PER_S)
#define DDL__TCP_RETRY_NS (50 * DDL__NS_PER_MS)
#define DDL__TCP_ENDING_MS 400u                /* from the end of a control connection to that of its data connection */
#define DDL__TCP_REFUSED_NS (1 * DDL__NS_PER_S) /* nobody has listened at its port for so long: it is gone */
#define DDL__TCP_SILENT_MS 4000u                /* its host has not answered for so long: it is cut off */

static void ddl__tcp_start(ddl__tcp *t, int32_t peer);

/* >>sockets */

static bool ddl__tcp_is_unix(const struct sockaddr_storage *a) { return a->ss_family == AF_UNIX; }

static bool ddl__tcp_is_loopback(const struct sockaddr_storage *a) {
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)a;
        return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
    }
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static void ddl__tcp_set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
}

/* Errors are ignored: each option is an improvement, none is needed. */
static void ddl__tcp_tune_socket(ddl__tcp *t, int fd, bool same_host, bool is_control) {
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    ddl__tcp_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    ddl__tcp_set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    if (is_control) {
        ddl__tcp_set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, DDL__TCP_SILENT_MS);
    }
    /* Congestion control that paces (bbr) halves the bandwidth of loopback, where there is nothing to be gentle with. A
     * socket that was paced once stays so, therefore the listener begins without and only links to other hosts get the
     * system's choice. */
    const char *control = same_host ? "reno" : t->congestion;
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, (socklen_t)strlen(control));
}

/* Without a secret, the uid of the other end is the proof. */
static bool ddl__tcp_same_user(int fd) {
    struct ucred cred;
    socklen_t bytes = sizeof cred;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) == 0 && cred.uid == geteuid();
}

/* >>connections */

static ddl__tcp_conn *ddl__tcp_conn_new(ddl__tcp *t, int fd, int32_t peer, bool is_client) {
    ddl__tcp_conn *c = t->host->alloc(t->host, sizeof *c);
    if (c == NULL) {
        return NULL;
    }
    c->fd = fd;
    c->peer = peer;
    c->is_client = is_client;
    c->since_ns = t->host->now_ns(t->host);
    return c;
}

static void ddl__tcp_proof_free(ddl__tcp *t, ddl__tcp_conn *c) {
    if (c->proof != NULL) {
        t->host->prove(t->host, &c->proof, c->is_client, c->peer, NULL, 0, NULL, NULL, NULL, NULL);
        c->proof = NULL;
    }
}

static void ddl__tcp_conn_free(ddl__tcp *t, ddl__tcp_conn *c) {
    if (c == NULL) {
        return;
    }
    ddl__tcp_proof_free(t, c);
    if (c->token != NULL) {
        t->host->landed(t->host, c->peer, c->token, DDL_ERR_PEER);
    }
    close(c->fd);
    t->host->free(t->host, c);
}

static void ddl__tcp_stranger_unlink(ddl__tcp *t, ddl__tcp_conn *c) {
    for (ddl__tcp_conn **at = &t->strangers; *at != NULL; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            c->next = NULL;
            t->stranger_count--;
            return;
        }
    }
}

static void ddl__tcp_stranger_drop(ddl__tcp *t, ddl__tcp_conn *c, const char *why) {
    ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: closed a connection to our port that %s", why);
    ddl__tcp_stranger_unlink(t, c);
    ddl__tcp_conn_free(t, c);
}

/* The side that made the data connection makes the control connection. */
static bool ddl__tcp_wants_control(const ddl__tcp_peer *p) {
    return p->data != NULL && p->data->state == DDL__TCP_READY && p->data->is_client && p->control == NULL &&
           !p->same_host;
}

static void ddl__tcp_look_again(ddl__tcp *t, ddl__tcp_peer *p, uint64_t after_ns) {
    if (p->retry_ns == 0) {
        t->retry_count++;
    }
    p->retry_ns = t->host->now_ns(t->host) + after_ns;
}

/* Plans another attempt to connect, or gives the peer up. Nothing has been sent on the failed one. */
static void ddl__tcp_retry(ddl__tcp *t, int32_t peer, int error) {
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->dead || p->lost || (p->data != NULL && !ddl__tcp_wants_control(p))) {
        return;
    }
    uint64_t limit = error == ECONNREFUSED ? DDL__TCP_REFUSED_NS : DDL__TCP_SILENT_MS * DDL__NS_PER_MS;
    if (p->data == NULL && t->host->now_ns(t->host) - p->trying_ns >= limit) {
        t->host->lost(t->host, peer, error == ECONNREFUSED ? error : ENOTCONN, "it could not be connected to");
        return;
    }
    ddl__tcp_look_again(t, p, p->data == NULL ? DDL__TCP_RETRY_NS : DDL__NS_PER_S);
}

/* A connection broke. One that was ready is a loss, which the core judges; one that was being made is tried again. */
static void ddl__tcp_broken(ddl__tcp *t, ddl__tcp_conn *c, int error) {
    if (c->peer < 0 || (!c->is_client && c->state != DDL__TCP_READY)) {
        ddl__tcp_stranger_drop(t, c, "ended before it proved anything");
        return;
    }
    ddl__tcp_peer *p = &t->peers[c->peer];
    int32_t peer = c->peer;
    bool was_ready = c->state == DDL__TCP_READY;
    if (p->control == c) {
        p->control = NULL;
        ddl__tcp_conn_free(t, c);
        /* When the peer ends, so does the data connection, and its last words are read first. */
        if (was_ready && error > 0 && error != ECONNRESET && error != EPIPE) {
            t->host->lost(t->host, peer, error, "its control connection ended");
        } else if (was_ready && p->data != NULL) {
            p->ending = true;
            ddl__tcp_look_again(t, p, DDL__TCP_ENDING_MS * DDL__NS_PER_MS);
        } else {
            ddl__tcp_retry(t, peer, error);
        }
        return;
    }
    p->data = NULL;
    ddl__tcp_conn_free(t, c);
    if (was_ready) {
        p->lost = true;
        t->host->lost(t->host, peer, error > 0 ? error : 0, "its connection ended");
    } else if (p->first != NULL || p->wanted) {
        ddl__tcp_retry(t, peer, error);
    }
}

static void ddl__tcp_backlog_add(ddl__tcp *t, int32_t peer) {
    if (!t->peers[peer].backlogged) {
        t->peers[peer].backlogged = true;
        t->backlog[t->backlog_count++] = peer;
    }
}

/* The peer takes nothing more, but what it said before is still to be read: its results, its goodbye. */
static void ddl__tcp_hear_out(ddl__tcp *t, ddl__tcp_conn *c) {
    int error = 0;
    while (error == 0 && ddl__tcp_read(t, c, &error) > 0) {
    }
}

/* Sends what waits for the peer; what the socket does not take stays in the backlog. */
static void ddl__tcp_push(ddl__tcp *t, int32_t peer) {
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->first == NULL || p->data == NULL || p->data->state != DDL__TCP_READY) {
        return;
    }
    int error = ddl__tcp_flush(t, p);
    if (error != 0) {
        ddl__tcp_hear_out(t, p->data);
        ddl__tcp_broken(t, p->data, error);
    } else if (p->first != NULL) {
        ddl__tcp_backlog_add(t, peer);
    }
}

static void ddl__tcp_ready(ddl__tcp *t, ddl__tcp_conn *c) {
    ddl__tcp_peer *p = &t->peers[c->peer];
    c->state = DDL__TCP_READY;
    c->writing = true;
    ddl__tcp_want_write(t, c, false);
    if (c->is_control) {
        return;
    }
    p->trying_ns = 0;
    c->acks = !ddl__tcp_is_unix(&t->bound) && t->params.local_ranks <= t->params.cores;
    ddl__tcp_set(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 0); /* a stopped peer's full window is no cut */
    if (ddl__tcp_wants_control(p)) {
        ddl__tcp_start(t, c->peer);
    }
    ddl__tcp_push(t, c->peer);
}

/* >>proof */

/* The server knows now who is there and for what. False: the connection is not wanted. */
static bool ddl__tcp_adopt(ddl__tcp *t, ddl__tcp_conn *c) {
    ddl__tcp_peer *p = &t->peers[c->peer];
    if (p->dead || p->lost || !p->reachable) {
        return false;
    }
    if (c->is_control) {
        if (p->control != NULL) {
            return false;
        }
        p->control = c;
    } else {
        /* Both connect at once: the attempt of the lower rank stays, if it gets through at all: before it has, the
         * other side cannot have taken it. A ready one is never replaced. */
        if (p->data != NULL && (p->data->state == DDL__TCP_READY ||
                                (c->peer > t->params.rank && p->data->state != DDL__TCP_CONNECTING))) {
            return false;
        }
        ddl__tcp_conn_free(t, p->data);
        p->data = c;
        if (p->retry_ns != 0) {
            p->retry_ns = 0;
            t->retry_count--;
        }
    }
    ddl__tcp_stranger_unlink(t, c);
    /* Until the go the client does not take the connection for ready: a refusal costs it nothing but another try. */
    if (send(c->fd, "G", 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
        ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: rank %d went away while it connected", c->peer); /* reading shows it too */
    }
    ddl__tcp_ready(t, c);
    return true;
}

/* The client waits for the server's go. */
static void ddl__tcp_await_go(ddl__tcp *t, ddl__tcp_conn *c) {
    uint8_t go = 0;
    ssize_t n = recv(c->fd, &go, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n == 1 && go == 'G') {
        ddl__tcp_ready(t, c);
    } else {
        ddl__tcp_broken(t, c, n < 0 ? errno : ECONNABORTED);
    }
}

static void ddl__tcp_channel(ddl__tcp *t, ddl__tcp_conn *c) {
    uint8_t channel;
    ssize_t n = recv(c->fd, &channel, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    c->is_control = n == 1 && channel == 'C';
    if (n != 1 || (channel != 'C' && channel != 'D') || !ddl__tcp_adopt(t, c)) {
        ddl__tcp_stranger_drop(t, c, "was not wanted");
        return;
    }
    bool same_host = t->peers[c->peer].same_host;
    ddl__tcp_tune_socket(t, c->fd, same_host, c->is_control);
}

static void ddl__tcp_proven(ddl__tcp *t, ddl__tcp_conn *c, int32_t peer) {
    c->proof = NULL;
    if (!c->is_client) {
        c->peer = peer;
        c->state = DDL__TCP_CHANNEL;
        ddl__tcp_channel(t, c);
    } else if (send(c->fd, c->is_control ? "C" : "D", 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) {
        ddl__tcp_broken(t, c, errno);
    } else {
        c->state = DDL__TCP_CHANNEL;
        ddl__tcp_await_go(t, c);
    }
}

/* Feeds the handshake over a socket with what has come. It is peeked at first, so that bytes behind the handshake
 * stay. *peer: a client's is known, a server's is found out. DDL_ERR_PEER: the socket broke, errno says how (0: its
 * end). */
static ddl_status ddl__tcp_handshake(const ddl_host *host, int fd, bool is_client, void **proof, int32_t *peer) {
    uint8_t in[256], out[256];
    ssize_t n = recv(fd, in, sizeof in, MSG_DONTWAIT | MSG_PEEK);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        errno = n < 0 ? errno : 0;
        return DDL_ERR_PEER;
    }
    size_t used = 0, out_bytes = 0;
    int32_t other = *peer;
    ddl_status status =
        host->prove(host, proof, is_client, *peer, in, n > 0 ? (size_t)n : 0, &used, out, &out_bytes, &other);
    if (used > 0 && recv(fd, in, used, MSG_DONTWAIT) != (ssize_t)used) {
        status = DDL_ERR_SYSTEM;
    }
    /* A fresh socket takes 256 bytes or is broken. */
    if (out_bytes > 0 && send(fd, out, out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)out_bytes) {
        status = DDL_ERR_SYSTEM;
    }
    *peer = status == DDL_OK ? other : *peer;
    return status;
}

static void ddl__tcp_prove(ddl__tcp *t, ddl__tcp_conn *c) {
    int32_t peer = c->peer;
    ddl_status status = ddl__tcp_handshake(t->host, c->fd, c->is_client, &c->proof, &peer);
    if (status == DDL_OK) {
        ddl__tcp_proven(t, c, peer);
    } else if (status == DDL_ERR_PEER) {
        ddl__tcp_broken(t, c, errno);
    } else if (status < 0 && c->is_client) {
        ddl__tcp_broken(t, c, ECONNREFUSED);
    } else if (status < 0) {
        ddl__tcp_stranger_drop(t, c, "could not prove that it belongs to this job");
    }
}

/* >>connecting */

/* Starts the data connection to a peer, or its control connection when the data connection is ready. */
static void ddl__tcp_start(ddl__tcp *t, int32_t peer) {
    ddl__tcp_peer *p = &t->peers[peer];
    bool is_control = p->data != NULL;
    int fd = socket(p->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    ddl__tcp_conn *c = fd < 0 ? NULL : ddl__tcp_conn_new(t, fd, peer, true);
    if (c == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        ddl__tcp_retry(t, peer, fd < 0 ? errno : ENOMEM);
        return;
    }
    c->is_control = is_control;
    c->state = DDL__TCP_CONNECTING;
    p->trying_ns = p->trying_ns != 0 || is_control ? p->trying_ns : c->since_ns;
    *(is_control ? &p->control : &p->data) = c;
    ddl__tcp_tune_socket(t, fd, p->same_host, true); /* attempts to connect end like cuts */
    int result = connect(fd, (struct sockaddr *)&p->address, p->address_bytes);
    if (result < 0 && errno != EINPROGRESS && errno != EINTR) {
        ddl__tcp_broken(t, c, errno);
        return;
    }
    c->writing = true;
    ddl__tcp_watch(t, c, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
}

static void ddl__tcp_connected(ddl__tcp *t, ddl__tcp_conn *c) {
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error == 0 && ddl__tcp_is_unix(&t->peers[c->peer].address) && !ddl__tcp_same_user(c->fd)) {
        error = EACCES;
    }
    if (error != 0) {
        ddl__tcp_broken(t, c, error);
        return;
    }
    c->state = DDL__TCP_PROVING;
    ddl__tcp_want_write(t, c, false);
    ddl__tcp_prove(t, c);
}

static void ddl__tcp_accept(ddl__tcp *t) {
    for (;;) {
        int fd = accept4(t->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED) {
                continue;
            }
            return;
        }
        if (t->stranger_count >= DDL__TCP_STRANGERS_MAX) {
            ddl__tcp_stranger_drop(t, t->strangers, "was the oldest of too many silent ones");
        }
        bool known = !ddl__tcp_is_unix(&t->bound) || ddl__tcp_same_user(fd);
        ddl__tcp_conn *c = known ? ddl__tcp_conn_new(t, fd, -1, false) : NULL;
        if (c == NULL) {
            close(fd);
            continue;
        }
        c->state = DDL__TCP_PROVING;
        ddl__tcp_conn **end = &t->strangers;
        while (*end != NULL) {
            end = &(*end)->next;
        }
        *end = c;
        t->stranger_count++;
        ddl__tcp_watch(t, c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

/* Silent strangers are closed after 5 s; what they sent has been read before this is asked. */
static void ddl__tcp_evict(ddl__tcp *t) {
    uint64_t now = t->host->now_ns(t->host);
    while (t->strangers != NULL && now - t->strangers->since_ns > DDL__TCP_PROOF_NS) {
        ddl__tcp_stranger_drop(t, t->strangers, "said nothing useful for 5 s");
    }
}

/* The control connection of a peer has ended. Its last words may take long on a slow link; but where nothing of ours
 * gets through to it, its kernel never comes to sending the end of the data connection. */
static void ddl__tcp_end(ddl__tcp *t, ddl__tcp_peer *p) {
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(p->data->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
        info.tcpi_last_data_recv < DDL__TCP_ENDING_MS) {
        ddl__tcp_look_again(t, p, DDL__TCP_ENDING_MS * DDL__NS_PER_MS);
        return;
    }
    ddl__tcp_hear_out(t, p->data);
    ddl__tcp_broken(t, p->data, ECONNRESET);
}

static void ddl__tcp_retries(ddl__tcp *t) {
    uint64_t now = t->host->now_ns(t->host);
    for (int32_t i = 0; i < t->params.world_size && t->retry_count > 0; i++) {
        ddl__tcp_peer *p = &t->peers[i];
        if (p->retry_ns != 0 && now >= p->retry_ns) {
            p->retry_ns = 0;
            t->retry_count--;
            if (p->ending && p->data != NULL) {
                ddl__tcp_end(t, p);
            } else if (!p->dead && !p->lost && (p->data == NULL || ddl__tcp_wants_control(p))) {
                ddl__tcp_start(t, i);
            }
        }
    }
}

/* >>progress */

static int ddl__tcp_receive(ddl__tcp *t, ddl__tcp_conn *c) {
    int error;
    int events = ddl__tcp_read(t, c, &error);
    if (error != 0) {
        ddl__tcp_broken(t, c, error > 0 ? error : 0);
        events++;
    }
    return events;
}

static void ddl__tcp_event(ddl__tcp *t, ddl__tcp_conn *c, uint32_t events) {
    if (c == NULL) {
        ddl__tcp_accept(t);
        return;
    }
    switch (c->state) {
    case DDL__TCP_CONNECTING:
        ddl__tcp_connected(t, c);
        break;
    case DDL__TCP_PROVING:
        ddl__tcp_prove(t, c);
        break;
    case DDL__TCP_CHANNEL:
        if (c->is_client) {
            ddl__tcp_await_go(t, c);
        } else {
            ddl__tcp_channel(t, c);
        }
        break;
    case DDL__TCP_READY:
        if (events & EPOLLOUT) {
            ddl__tcp_want_write(t, c, false);
            ddl__tcp_push(t, c->peer);
        } else {
            ddl__tcp_receive(t, c);
        }
        break;
    }
}

static int ddl__tcp_poll_all(ddl__tcp *t) {
    /* Few at a time: a connection that is freed while its event waits in this array must not be touched, so events are
     * taken one by one where that can happen. */
    struct epoll_event event;
    int events = 0;
    while (events < 64 && epoll_wait(t->epoll_fd, &event, 1, 0) == 1) {
        ddl__tcp_event(t, event.data.ptr, event.events);
        events++;
    }
    if (t->strangers != NULL) {
        ddl__tcp_evict(t);
    }
    if (t->retry_count > 0) {
        ddl__tcp_retries(t);
    }
    return events;
}

/* sent() may bring new messages, and so new peers into the backlog: those that are served leave it only at the end. */
static void ddl__tcp_push_backlog(ddl__tcp *t) {
    for (int32_t i = 0; i < t->backlog_count; i++) {
        ddl__tcp_push(t, t->backlog[i]);
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < t->backlog_count; i++) {
        int32_t peer = t->backlog[i];
        t->peers[peer].backlogged = t->peers[peer].first != NULL;
        if (t->peers[peer].backlogged) {
            t->backlog[kept++] = peer;
        }
    }
    t->backlog_count = kept;
}

static int32_t ddl__tcp_progress(void *self, int32_t expect) {
    ddl__tcp *t = self;
    int32_t events = 0;
    if (t->backlog_count > 0) {
        ddl__tcp_push_backlog(t);
    }
    if (expect >= 0 && t->peers[expect].data != NULL && t->peers[expect].data->state == DDL__TCP_READY) {
        events = ddl__tcp_receive(t, t->peers[expect].data);
        if (events > 0 || ++t->misses < DDL__TCP_EPOLL_EVERY) {
            return events;
        }
    }
    t->misses = 0;
    return events + ddl__tcp_poll_all(t);
}

static ddl_status ddl__tcp_arm(void *self, int *out_fd) {
    ddl__tcp *t = self;
    for (int32_t i = 0; i < t->backlog_count; i++) {
        ddl__tcp_conn *c = t->peers[t->backlog[i]].data;
        if (c != NULL && c->state == DDL__TCP_READY) {
            ddl__tcp_want_write(t, c, true);
        }
    }
    *out_fd = t->epoll_fd;
    return DDL_OK;
}

/* >>table */

static ddl_status ddl__tcp_send(void *self, int32_t peer, ddl_message *m) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    if (p->dead || !p->reachable) {
        return DDL_ERR_PEER;
    }
    m->next = NULL;
    if (p->first == NULL && p->data != NULL && p->data->state == DDL__TCP_READY) {
        ssize_t n = ddl__tcp_send_now(p, m);
        if (n == (ssize_t)ddl__tcp_message_bytes(m)) {
            return DDL_OK;
        }
        /* An error shows again when the queue is flushed, where a broken connection is dealt with. */
        p->first_sent = n > 0 ? (uint64_t)n : 0;
    }
    if (p->first == NULL) {
        p->first = m;
    } else {
        p->last->next = m;
    }
    p->last = m;
    if (p->data == NULL && p->retry_ns == 0 && !p->lost) {
        ddl__tcp_start(t, peer);
    } else if (p->data != NULL && p->data->state == DDL__TCP_READY) {
        ddl__tcp_backlog_add(t, peer);
    }
    return DDL_IN_PROGRESS;
}

static ddl_status ddl__tcp_connect(void *self, int32_t peer) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->wanted = true;
    if (p->reachable && p->data == NULL && p->retry_ns == 0 && !p->lost) {
        ddl__tcp_start(t, peer);
    }
    return DDL_OK;
}

static void ddl__tcp_peer_dead(void *self, int32_t peer) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->dead = true;
    if (p->retry_ns != 0) {
        p->retry_ns = 0;
        t->retry_count--;
    }
    ddl__tcp_conn *data = p->data, *control = p->control;
    p->data = p->control = NULL;
    ddl__tcp_conn_free(t, data);
    ddl__tcp_conn_free(t, control);
    ddl__tcp_drop(t, p, DDL_ERR_PEER);
}

/* A frame cannot end in the middle: of a message that is partly sent a copy takes its place in the queue, which is
 * freed instead of sent(). Without memory for it the connection is given up; not at once, we may be inside a read of
 * it. */
static bool ddl__tcp_orphan(ddl__tcp *t, ddl__tcp_peer *p, const ddl_message *m) {
    ddl_message *copy = t->host->alloc(t->host, sizeof *copy + m->payload_bytes);
    if (copy == NULL) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: no memory to end a message in order; its connection is closed");
        shutdown(p->data->fd, SHUT_RDWR);
        return false;
    }
    memcpy(copy, m, sizeof *copy);
    copy->payload = copy + 1;
    if (m->payload_bytes > 0) {
        memcpy(copy + 1, m->payload, m->payload_bytes);
    }
    p->orphan = p->first = copy;
    p->last = p->last == m ? copy : p->last;
    return true;
}

static void ddl__tcp_recall(void *self, int32_t peer, ddl_message *m) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    if (ddl__tcp_unlist(&p->done, m)) {
        return;
    }
    if (p->first == m && p->first_sent > 0) {
        if (p->data != NULL && ddl__tcp_orphan(t, p, m)) {
            return;
        }
        p->first_sent = 0;
    }
    for (ddl_message **at = &p->first, *last = NULL; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == m) {
            *at = m->next;
            if (p->last == m) {
                p->last = last;
            }
            return;
        }
    }
}

static void ddl__tcp_redirect(void *self, int32_t peer, void *token, void *new_landing) {
    ddl__tcp *t = self;
    ddl__tcp_conn *c = t->peers[peer].data;
    if (c != NULL && c->token == token) {
        c->landing = new_landing; /* the core discards it: where in it the rest goes does not matter */
        c->cut = new_landing == NULL;
    }
}

/* Waits until the kernel has the last bytes acknowledged, 500 ms at most: closing with bytes unread makes the kernel
 * drop what it has not sent, and so does a peer that speaks to a socket that is gone. */
static void ddl__tcp_linger(ddl__tcp *t, ddl__tcp_conn *c, uint64_t deadline) {
    shutdown(c->fd, SHUT_WR);
    int unsent = 0;
    bool safe = ddl__tcp_is_unix(&t->peers[c->peer].address); /* its bytes are in the peer's hands already */
    while (!safe && ioctl(c->fd, TIOCOUTQ, &unsent) == 0 && unsent > 0 &&
           ddl__now_ns() < deadline) {
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    while (recv(c->fd, t->stage, sizeof t->stage, MSG_DONTWAIT) > 0) {
    }
}

static void ddl__tcp_close(void *self) {
    ddl__tcp *t = self;
    const ddl_host *host = t->host;
    while (t->strangers != NULL) {
        ddl__tcp_stranger_drop(t, t->strangers, "came too late");
    }
    uint64_t deadline = ddl__now_ns() + 500 * DDL__NS_PER_MS;
    for (int32_t i = 0; t->peers != NULL && i < t->params.world_size; i++) {
        ddl__tcp_peer *p = &t->peers[i];
        if (p->data != NULL && p->data->state == DDL__TCP_READY) {
            ddl__tcp_flush(t, p);
            ddl__tcp_linger(t, p->data, deadline);
        }
        ddl__tcp_peer_dead(t, i);
    }
    if (t->listen_fd >= 0) {
        close(t->listen_fd);
    }
    if (t->epoll_fd >= 0) {
        close(t->epoll_fd);
    }
    host->free(host, t->backlog);
    host->free(host, t->peers);
    host->free(host, t);
}

/* >>address */

static const char *ddl__tcp_text(const struct sockaddr_storage *a, char *out, size_t bytes) {
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)a;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(out, bytes, "%s:%d", host, ntohs(in->sin_port));
    } else if (a->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)a;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host);
        snprintf(out, bytes, "[%s]:%d", host, ntohs(in6->sin6_port));
    } else {
        snprintf(out, bytes, "unix socket");
    }
    return out;
}

static void ddl__tcp_set_port(struct sockaddr_storage *a, int port) {
    if (a->ss_family == AF_INET) {
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
    } else {
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    }
}

/* 0, or what gai_strerror explains. */
static int ddl__tcp_resolve(const char *name, struct sockaddr_storage *out, socklen_t *out_bytes) {
    ddl__addresses found;
    int error = ddl__resolve(name, &found);
    if (error == 0) {
        *out = found.list[0].at.room;
        *out_bytes = found.list[0].bytes;
    }
    return error;
}

/* The address of this machine on the way to another: what the routing table would use. Nothing is sent. */
static bool ddl__tcp_route(struct sockaddr_storage far, socklen_t far_bytes, struct sockaddr_storage *out,
                           socklen_t *out_bytes) {
    ddl__tcp_set_port(&far, 9);
    int fd = socket(far.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    *out_bytes = sizeof *out;
    bool found = fd >= 0 && connect(fd, (struct sockaddr *)&far, far_bytes) == 0 &&
                 getsockname(fd, (struct sockaddr *)out, out_bytes) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return found;
}

static ddl_status ddl__tcp_towards(ddl__tcp *t, const char *master) {
    struct sockaddr_storage far;
    socklen_t far_bytes = 0;
    int error = ddl__tcp_resolve(master, &far, &far_bytes);
    if (error != 0) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: the name of the master, %s, cannot be resolved: %s; check MASTER_ADDR",
                     master, gai_strerror(error));
        return DDL_ERR_CONFIG;
    }
    if (!ddl__tcp_route(far, far_bytes, &t->bound, &t->bound_bytes)) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: there is no route to the master %s: %s; check MASTER_ADDR and the network",
                     master, strerror(errno));
        return DDL_ERR_CONFIG;
    }
    return DDL_OK;
}

/* Where to listen: the interface that was named, else the one that leads to the master. */
static ddl_status ddl__tcp_choose(ddl__tcp *t) {
    const ddl_transport_params *q = &t->params;
    if (!q->authenticated) {
        struct sockaddr_un *un = (struct sockaddr_un *)&t->bound;
        uint64_t salt = ddl__mix(ddl__now_ns(), (uint64_t)getpid());
        un->sun_family = AF_UNIX;
        int n = snprintf(un->sun_path + 1, sizeof un->sun_path - 1, "ddl-%d-%016llx", (int)getpid(),
                         (unsigned long long)ddl__mix(salt, (uint64_t)(uintptr_t)t));
        t->bound_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
        return DDL_OK;
    }
    if (q->interface_name != NULL) {
        ddl__addresses found = {0};
        ddl__interface_addresses(q->interface_name, &found);
        if (found.count > 0) {
            memcpy(&t->bound, &found.list[0].at, sizeof t->bound);
            t->bound_bytes = found.list[0].bytes;
            return DDL_OK;
        }
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: interface %s has no address; check DDL_INTERFACE and `ip addr`",
                     q->interface_name);
        return DDL_ERR_CONFIG;
    }
    return ddl__tcp_towards(t, q->master_host != NULL ? q->master_host : "127.0.0.1");
}

/* The descriptor, or -1 with errno. Connections of the job before, in TIME_WAIT, hold no port of a range; two that
 * bind the same port are told apart by listen(). */
static int ddl__tcp_listen_at(ddl__tcp *t, int port) {
    int fd = socket(t->bound.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (!ddl__tcp_is_unix(&t->bound)) {
        ddl__tcp_set_port(&t->bound, port);
        ddl__tcp_set(fd, SOL_SOCKET, SO_REUSEADDR, port != 0);
    }
    if (bind(fd, (struct sockaddr *)&t->bound, t->bound_bytes) == 0 && listen(fd, 1024) == 0) {
        return fd;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static ddl_status ddl__tcp_listen(ddl__tcp *t) {
    int low = 0, high = 0;
    if (t->params.port_range != NULL && sscanf(t->params.port_range, "%d-%d", &low, &high) < 2) {
        high = low;
    }
    for (int port = low; port <= high && t->listen_fd < 0; port++) {
        t->listen_fd = ddl__tcp_listen_at(t, port);
    }
    char text[80];
    if (t->listen_fd < 0) {
        ddl__tcp_log(t, DDL_LOG_WARN, "tcp: cannot listen on %s%s%s: %s", ddl__tcp_text(&t->bound, text, sizeof text),
                     t->params.port_range != NULL ? " or any other port of the range " : "",
                     t->params.port_range != NULL ? t->params.port_range : "", strerror(errno));
        return DDL_ERR_SYSTEM;
    }
    socklen_t name_bytes = sizeof t->congestion - 1;
    if (getsockopt(t->listen_fd, IPPROTO_TCP, TCP_CONGESTION, t->congestion, &name_bytes) == 0) {
        setsockopt(t->listen_fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    }
    socklen_t bytes = sizeof t->bound;
    getsockname(t->listen_fd, (struct sockaddr *)&t->bound, &bytes);
    ddl__tcp_log(t, DDL_LOG_DEBUG, "tcp: listening on %s", ddl__tcp_text(&t->bound, text, sizeof text));
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = NULL}};
    return epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->listen_fd, &event) == 0 ? DDL_OK : DDL_ERR_SYSTEM;
}

static ddl_status ddl__tcp_open(const ddl_host *host, const ddl_transport_params *params, void **out_self) {
    ddl__tcp *t = host->alloc(host, sizeof *t);
    if (t == NULL) {
        return DDL_ERR_NOMEM;
    }
    t->host = host;
    t->params = *params;
    t->listen_fd = -1;
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->peers = host->alloc(host, (size_t)params->world_size * sizeof *t->peers);
    t->backlog = host->alloc(host, (size_t)params->world_size * sizeof *t->backlog);
    ddl_status status = t->peers == NULL || t->backlog == NULL ? DDL_ERR_NOMEM
                        : t->epoll_fd < 0                      ? DDL_ERR_SYSTEM
                                                               : ddl__tcp_choose(t);
    if (status == DDL_OK) {
        status = ddl__tcp_listen(t);
    }
    if (status != DDL_OK) {
        ddl__tcp_close(t);
        return status;
    }
    *out_self = t;
    return DDL_OK;
}

/* The address on the wire: where we listen, for ranks of this host, then what others are to use, nothing when it is the
 * same. Each is length u8, then the sockaddr as it is, family first: peers run the same OS and byte order, which the
 * handshake's magic has checked. */
static ddl_status ddl__tcp_address(void *self, void *out_address, size_t *bytes) {
    ddl__tcp *t = self;
    struct sockaddr_storage a;
    socklen_t length = 0;
    if (t->params.advertise != NULL && !ddl__tcp_is_unix(&t->bound)) {
        int port = ntohs(((struct sockaddr_in *)&t->bound)->sin_port); /* at the same place in both families */
        int error = ddl__tcp_resolve(t->params.advertise, &a, &length);
        if (error != 0) {
            ddl__tcp_log(t, DDL_LOG_WARN,
                         "tcp: the address to advertise, %s, cannot be resolved: %s; check DDL_ADVERTISE",
                         t->params.advertise, gai_strerror(error));
            return DDL_ERR_CONFIG;
        }
        ddl__tcp_set_port(&a, port);
    }
    size_t first = (size_t)t->bound_bytes + 1;
    if (*bytes < first + length + 1) {
        return DDL_ERR_ARG;
    }
    uint8_t *out = out_address;
    out[0] = (uint8_t)t->bound_bytes;
    memcpy(out + 1, &t->bound, t->bound_bytes);
    out[first] = (uint8_t)length;
    memcpy(out + first + 1, &a, length);
    *bytes = first + length + 1;
    return DDL_OK;
}

/* A family that ranks listen on, whole; a unix socket in the abstract namespace. */
static bool ddl__tcp_address_ok(const struct sockaddr_storage *a, size_t bytes) {
    size_t name = offsetof(struct sockaddr_un, sun_path);
    switch (a->ss_family) {
    case AF_INET:
        return bytes == sizeof(struct sockaddr_in);
    case AF_INET6:
        return bytes == sizeof(struct sockaddr_in6);
    default:
        return ddl__tcp_is_unix(a) && bytes > name + 1 && bytes <= sizeof(struct sockaddr_un) &&
               ((const char *)a)[name] == 0;
    }
}

/* One of the addresses of a rank. Returns the bytes it took, 0 when they make no sense. No address leaves *out as it
 * is. */
static size_t ddl__tcp_address_read(const uint8_t *in, size_t bytes, struct sockaddr_storage *out,
                                    socklen_t *out_bytes) {
    struct sockaddr_storage a;
    size_t length = bytes > 0 ? in[0] : 0;
    if (length >= bytes || length > sizeof a) {
        return 0;
    }
    if (length > 0) {
        memset(&a, 0, sizeof a);
        memcpy(&a, in + 1, length);
        if (!ddl__tcp_address_ok(&a, length)) {
            return 0;
        }
        *out = a;
        *out_bytes = (socklen_t)length;
    }
    return length + 1;
}

/* Of what ddl__tcp_address of another rank gave, the address that this rank is to use. DDL_ERR_CORRUPT: it makes no
 * sense; DDL_ERR_UNSUPPORTED: it does not lead out of the other's host. */
static ddl_status ddl__tcp_address_parse(const uint8_t *in, size_t bytes, bool same_host, struct sockaddr_storage *out,
                                         socklen_t *out_bytes) {
    *out_bytes = 0;
    size_t used = ddl__tcp_address_read(in, bytes, out, out_bytes);
    if (used > 0 && !same_host) {
        used = ddl__tcp_address_read(in + used, bytes - used, out, out_bytes);
    }
    if (used == 0 || *out_bytes == 0) {
        return DDL_ERR_CORRUPT;
    }
    return !same_host && (ddl__tcp_is_unix(out) || ddl__tcp_is_loopback(out)) ? DDL_ERR_UNSUPPORTED : DDL_OK;
}

static ddl_status ddl__tcp_add_peer(void *self, int32_t peer, const void *address, size_t bytes,
                                    const char *peer_host_id, uint64_t *out_latency_ns, uint64_t *out_bytes_per_s) {
    ddl__tcp *t = self;
    ddl__tcp_peer *p = &t->peers[peer];
    p->same_host = strcmp(peer_host_id, t->params.host_id) == 0;
    DDL__TRY(ddl__tcp_address_parse(address, bytes, p->same_host, &p->address, &p->address_bytes));
    p->reachable = true;
    *out_latency_ns = p->same_host ? 8000 : 25000;
    *out_bytes_per_s = p->same_host ? 3000000000u : 1200000000u;
    return DDL_OK;
}

static const ddl_transport ddl__tcp_transport = {
    .size = sizeof(ddl_transport),
    .flags = DDL_TRANSPORT_ORDERED,
    .max_payload_bytes = DDL__FRAME_MAX_PAYLOAD,
    .open = ddl__tcp_open,
    .close = ddl__tcp_close,
    .address = ddl__tcp_address,
    .add_peer = ddl__tcp_add_peer,
    .send = ddl__tcp_send,
    .progress = ddl__tcp_progress,
    .arm = ddl__tcp_arm,
    .peer_dead = ddl__tcp_peer_dead,
    .connect = ddl__tcp_connect,
    .recall = ddl__tcp_recall,
    .redirect = ddl__tcp_redirect,
};

static const ddl_plugin ddl__tcp_plugin = {
    .size = sizeof(ddl_plugin),
    .abi = DDL_PLUGIN_ABI,
    .name = "tcp",
    .version = "built in",
    .about = "TCP between hosts, TCP or unix sockets on one host.",
    .transport = &ddl__tcp_transport,
};

/* >>loader/check */
/* loader/check: may this file be opened as a plugin, and is what it returns a plugin? Answers in sentences. A plugin is
 * trusted code: these checks keep out what somebody else may have put there and what cannot work; they do not contain a
 * plugin that was let in. It must not know of search paths or of what is loaded already. */

#define DDL__PLUGIN_NAME_BYTES 48 /* with the NUL */
#define DDL__PLUGIN_REASON_BYTES 320

/* What comes of looking at a candidate. Absent and declined are normal; refused deserves a warning. */
typedef enum ddl__plugin_verdict {
    DDL__PLUGIN_USABLE,
    DDL__PLUGIN_ABSENT,
    DDL__PLUGIN_DECLINED, /* it says itself that it cannot work on this machine */
    DDL__PLUGIN_REFUSED
} ddl__plugin_verdict;

/* Who may own a plugin and its folder besides root. */
typedef struct ddl__plugin_owners {
    uid_t self;
    uid_t program; /* owns the running executable, so that this uid decides already what the process does */
} ddl__plugin_owners;

static ddl__plugin_verdict __attribute__((format(printf, 2, 3))) ddl__plugin_refuse(ddl__text *reason,
                                                                                  const char *format, ...) {
    char line[DDL__PLUGIN_REASON_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    ddl__text_add(reason, "%s", line);
    return DDL__PLUGIN_REFUSED;
}

/* [a-z][a-z0-9_]*: the name becomes part of a file's name and of a symbol's. */
static bool ddl__plugin_name_ok(const char *name) {
    size_t bytes = strlen(name);
    return bytes > 0 && bytes < DDL__PLUGIN_NAME_BYTES && name[0] >= 'a' && name[0] <= 'z' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == bytes;
}

/* The NAME of a file called libddl-NAME.so. */
static bool ddl__plugin_name_of(const char *path, char out_name[DDL__PLUGIN_NAME_BYTES]) {
    const char *slash = strrchr(path, '/');
    const char *base = slash != NULL ? slash + 1 : path;
    size_t bytes = strlen(base);
    if (strncmp(base, "libddl-", 7) != 0 || bytes <= 10 || strcmp(base + bytes - 3, ".so") != 0 ||
        bytes - 10 >= DDL__PLUGIN_NAME_BYTES) {
        return false;
    }
    memcpy(out_name, base + 7, bytes - 10);
    out_name[bytes - 10] = '\0';
    return ddl__plugin_name_ok(out_name);
}

/* root and this user can change this process anyway. */
static bool ddl__plugin_owner_ok(const ddl__plugin_owners *owners, uid_t uid) {
    return uid == 0 || uid == owners->self || uid == owners->program;
}

/* The folder that holds the file, and all above it up to the root. Whoever may write the folder may exchange the file;
 * whoever may write one above may exchange the folder, unless the sticky bit (as on /tmp) keeps it to its owner.
 * path is absolute and free of links; it is cut here at its slashes. */
static ddl__plugin_verdict ddl__plugin_check_folders(const ddl__plugin_owners *owners, char *path,
                                                     ddl__text *reason) {
    bool direct = true;
    for (char *slash = strrchr(path, '/'); slash != NULL; slash = strrchr(path, '/'), direct = false) {
        *slash = '\0';
        const char *folder = path[0] != '\0' ? path : "/";
        struct stat info;
        if (stat(folder, &info) != 0) {
            return ddl__plugin_refuse(reason, "folder %s: %s", folder, strerror(errno));
        }
        bool sticky = (info.st_mode & S_ISVTX) != 0;
        if ((info.st_mode & S_IWOTH) != 0 && (direct || !sticky)) {
            return ddl__plugin_refuse(reason, "anybody may write its folder %s; chmod o-w it", folder);
        }
        if (direct && !ddl__plugin_owner_ok(owners, info.st_uid)) {
            return ddl__plugin_refuse(reason, "its folder %s belongs to uid %u, which is neither root nor this user",
                                      folder, (unsigned)info.st_uid);
        }
    }
    return DDL__PLUGIN_USABLE;
}

/* On the opened file, not on its path. Group-writable is allowed: shared software folders of a cluster are. */
static ddl__plugin_verdict ddl__plugin_check_owner(const ddl__plugin_owners *owners, const struct stat *info,
                                                   ddl__text *reason) {
    if (!S_ISREG(info->st_mode)) {
        return ddl__plugin_refuse(reason, "it is not a regular file");
    }
    if ((info->st_mode & S_IWOTH) != 0) {
        return ddl__plugin_refuse(reason, "anybody may write this file; chmod o-w it");
    }
    if (!ddl__plugin_owner_ok(owners, info->st_uid)) {
        return ddl__plugin_refuse(reason, "it belongs to uid %u, which is neither root nor this user",
                                  (unsigned)info->st_uid);
    }
    return DDL__PLUGIN_USABLE;
}

/* What this program was compiled for, 0 when this list does not have it (then dlopen decides). */
#if defined(__x86_64__)
#define DDL__ELF_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define DDL__ELF_MACHINE EM_AARCH64
#elif defined(__powerpc64__)
#define DDL__ELF_MACHINE EM_PPC64
#elif defined(__s390x__)
#define DDL__ELF_MACHINE EM_S390
#elif defined(__riscv)
#define DDL__ELF_MACHINE EM_RISCV
#else
#define DDL__ELF_MACHINE 0
#endif

/* dlopen would say some of this, but for another machine it says "no such file or directory". */
static ddl__plugin_verdict ddl__plugin_check_elf_head(const Elf64_Ehdr *head, ddl__text *reason) {
    const uint16_t probe = 1; /* its first byte shows this processor's byte order */
    int order = *(const uint8_t *)&probe == 1 ? ELFDATA2LSB : ELFDATA2MSB;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) {
        return ddl__plugin_refuse(reason, "it is not a shared object (no ELF header)");
    }
    if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_ident[EI_DATA] != order) {
        return ddl__plugin_refuse(reason, "wrong ELF class or byte order: it is made for another kind of processor");
    }
    if (DDL__ELF_MACHINE != 0 && head->e_machine != DDL__ELF_MACHINE) {
        return ddl__plugin_refuse(reason, "it is made for another processor (ELF machine %u, this program is %u)",
                                  head->e_machine, (unsigned)DDL__ELF_MACHINE);
    }
    if (head->e_type != ET_DYN || head->e_phentsize != sizeof(Elf64_Phdr)) {
        return ddl__plugin_refuse(reason, "it is an ELF file, but not a shared object");
    }
    return DDL__PLUGIN_USABLE;
}

/* dlopen maps the segments and then reads them, so that a file cut short ends the process with SIGBUS: all segments
 * must lie inside the file. glibc checks the headers only. */
static ddl__plugin_verdict ddl__plugin_check_elf(int fd, uint64_t file_bytes, ddl__text *reason) {
    Elf64_Ehdr head;
    if (pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head) {
        return ddl__plugin_refuse(reason, "it is too short to be a shared object (%llu bytes)",
                                  (unsigned long long)file_bytes);
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_elf_head(&head, reason);
    for (uint32_t i = 0; verdict == DDL__PLUGIN_USABLE && i < head.e_phnum; i++) {
        Elf64_Phdr segment;
        uint64_t at = i * sizeof segment;
        bool inside = head.e_phoff <= file_bytes && at < file_bytes - head.e_phoff &&
                      pread(fd, &segment, sizeof segment, (off_t)(head.e_phoff + at)) == (ssize_t)sizeof segment &&
                      (segment.p_type == PT_NULL || (segment.p_offset <= file_bytes &&
                                                     segment.p_filesz <= file_bytes - segment.p_offset));
        if (!inside) {
            verdict = ddl__plugin_refuse(reason, "it is truncated: it ends after %llu bytes, inside segment %u of %u",
                                         (unsigned long long)file_bytes, i + 1, head.e_phnum);
        }
    }
    return verdict;
}

/* All that can be said of a file before any of its code runs. out_real is the path with links resolved: what was
 * checked is what gets opened, and no stranger may write to any part of that path. */
static ddl__plugin_verdict ddl__plugin_check_file(const ddl__plugin_owners *owners, const char *path,
                                                  char out_real[PATH_MAX], ddl__text *reason) {
    if (realpath(path, out_real) == NULL) {
        int absent = errno == ENOENT || errno == ENOTDIR;
        ddl__text_add(reason, "%s", absent ? "no such file" : strerror(errno));
        return absent ? DDL__PLUGIN_ABSENT : DDL__PLUGIN_REFUSED;
    }
    int fd = open(out_real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* it may turn out to be a fifo */
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        ddl__plugin_refuse(reason, "it cannot be read: %s", strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return DDL__PLUGIN_REFUSED;
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_owner(owners, &info, reason);
    if (verdict == DDL__PLUGIN_USABLE) {
        char folders[PATH_MAX];
        memcpy(folders, out_real, PATH_MAX);
        verdict = ddl__plugin_check_folders(owners, folders, reason);
    }
    if (verdict == DDL__PLUGIN_USABLE) {
        verdict = ddl__plugin_check_elf(fd, (uint64_t)info.st_size, reason);
    }
    close(fd);
    return verdict;
}

/* The first required member of a table that is missing, or NULL. A member counts as there when the table's own size
 * covers it and it is not NULL: what was compiled against an older header ends earlier. */
#define DDL__NEED(table, member)                                                                                       \
    if (!DDL_HAS(table, member)) {                                                                                     \
        return #member;                                                                                                \
    }

static const char *ddl__transport_lacks(const ddl_transport *transport) {
    DDL__NEED(transport, open)
    DDL__NEED(transport, close)
    DDL__NEED(transport, address)
    DDL__NEED(transport, add_peer)
    DDL__NEED(transport, send)
    DDL__NEED(transport, progress)
    /* A simulation or a futex sleeps its own way: one of the two ways to sleep is enough. */
    if (!DDL_HAS(transport, wait)) {
        DDL__NEED(transport, arm)
    }
    DDL__NEED(transport, peer_dead)
    return NULL;
}

static const char *ddl__device_lacks(const ddl_device *device) {
    DDL__NEED(device, open)
    DDL__NEED(device, close)
    DDL__NEED(device, count)
    DDL__NEED(device, owner)
    DDL__NEED(device, alloc)
    DDL__NEED(device, free)
    DDL__NEED(device, copy)
    return NULL;
}
#undef DDL__NEED

/* What the core relies on beyond the functions. */
static ddl__plugin_verdict ddl__plugin_check_transport(const ddl_transport *transport, ddl__text *reason) {
    const char *lacks = ddl__transport_lacks(transport);
    if (lacks != NULL) {
        return ddl__plugin_refuse(reason, "its transport lacks the required member %s (its table has %u bytes)", lacks,
                                  transport->size);
    }
    if ((transport->flags & DDL_TRANSPORT_ORDERED) == 0) {
        return ddl__plugin_refuse(reason, "its transport does not promise order (DDL_TRANSPORT_ORDERED)");
    }
    if (transport->max_payload_bytes < DDL_MESSAGE_PAYLOAD_BYTES) {
        return ddl__plugin_refuse(reason, "its transport takes payloads of at most %llu bytes "
                                  "(max_payload_bytes); messages have up to %u",
                                  (unsigned long long)transport->max_payload_bytes, DDL_MESSAGE_PAYLOAD_BYTES);
    }
    return DDL__PLUGIN_USABLE;
}

/* The table as ABI 1 began: what was appended since is optional. */
#define DDL__PLUGIN_V1_BYTES (offsetof(ddl_plugin, device) + sizeof(const ddl_device *))

/* size and abi come first in every version of the table, so that they can be read whatever the rest is. */
static ddl__plugin_verdict ddl__plugin_check_table(const ddl_plugin *plugin, const char *name, ddl__text *reason) {
    if (plugin->abi != DDL_PLUGIN_ABI) {
        return ddl__plugin_refuse(reason, "it was built for plugin ABI %u, this program has %u; build it again with "
                                  "this program's ddl.h", plugin->abi, DDL_PLUGIN_ABI);
    }
    if (plugin->size < DDL__PLUGIN_V1_BYTES) {
        return ddl__plugin_refuse(reason, "its table says it has %u bytes, fewer than the %u of ABI %u", plugin->size,
                                  (unsigned)DDL__PLUGIN_V1_BYTES, DDL_PLUGIN_ABI);
    }
    if (plugin->name == NULL || strcmp(plugin->name, name) != 0) {
        return ddl__plugin_refuse(reason, "its table is named \"%.40s\", the file \"%s\"",
                                  plugin->name != NULL ? plugin->name : "(null)", name);
    }
    if (plugin->transport == NULL && plugin->device == NULL) {
        return ddl__plugin_refuse(reason, "it offers neither a transport nor a device");
    }
    if (plugin->device != NULL && ddl__device_lacks(plugin->device) != NULL) {
        return ddl__plugin_refuse(reason, "its device lacks the required member %s (its table has %u bytes)",
                                  ddl__device_lacks(plugin->device), plugin->device->size);
    }
    return plugin->transport != NULL ? ddl__plugin_check_transport(plugin->transport, reason) : DDL__PLUGIN_USABLE;
}

/* >>loader */
/* loader: find, check and open plugins; keep a list of what was loaded and of what was refused and why.
 * It must not know which transport reaches whom, nor read settings: it is told what was asked for.
 *
 * A plugin NAME is looked for in this order, and the first that can be used is taken:
 *     1. an absolute path in a list of what must load (ddl_config.plugins, then DDL_PLUGINS, then ...)
 *     2. the plugins folded into this program (amalgamate.py --with)
 *     3. the folders of DDL_PLUGIN_PATH, in their order
 *     4. the folder of the executable
 *     5. DDL_PLUGIN_DIR, given when ddl was compiled
 * Never the current folder, never a relative path. What must load is looked for by name; besides, everything that lies
 * in these folders is tried, unless a list contains the word none. Nothing that was opened is ever closed: a plugin may
 * have started threads or registered destructors. Compiled with DDL_NO_PLUGINS, only 2 is left. */

#define DDL__PLUGINS_PER_FOLDER 64

/* A plugin that is part of this program. */
typedef struct ddl__plugin_static {
    const char *name;
    ddl_plugin_fn entry;
} ddl__plugin_static;

/* A list of names and absolute paths that must load, separated by commas, and how to call it in an error. */
typedef struct ddl__plugin_asked {
    const char *list; /* or NULL */
    const char *source;
} ddl__plugin_asked;

typedef struct ddl__loader_params {
    const ddl_host *host;           /* for the entry functions: alloc, free, log, setting, now_ns */
    const ddl__plugin_asked *asked; /* in order of preference */
    size_t asked_count;
    const char *const *built_in; /* names in the lists that need no plugin ("tcp"); NULL at the end; may be NULL */
    const char *path;            /* DDL_PLUGIN_PATH: absolute folders, separated by colons; or NULL */
    const char *libdir;          /* ddl__plugin_libdir(); a test gives its own; or NULL */
    const ddl__plugin_static *statics; /* ddl__plugin_statics(); ends with a NULL name; may be NULL */
} ddl__loader_params;

/* One line of ddl-info. Loaded: plugin is set. Refused: reason is. */
typedef struct ddl__plugin_record {
    struct ddl__plugin_record *next;
    const ddl_plugin *plugin;
    void *handle;     /* of dlopen; NULL when folded in or refused */
    const char *path; /* "(built in: NAME)" when folded in */
    const char *reason;
    bool needed; /* a list of what must load led to it */
    char name[DDL__PLUGIN_NAME_BYTES];
} ddl__plugin_record;

typedef struct ddl__loader {
    ddl__base *base;
    const ddl__loader_params *params; /* while it opens */
    ddl__plugin_owners owners;
    ddl__plugin_record *loaded;  /* in the order of search */
    ddl__plugin_record *refused; /* declined ones too */
    bool out_of_memory;
} ddl__loader;

/* What became of one candidate. */
typedef struct ddl__plugin_try {
    char name[DDL__PLUGIN_NAME_BYTES];
    const char *path;
    const ddl_plugin *plugin;
    void *handle;
    char reason[DDL__PLUGIN_REASON_BYTES];
    ddl__text text; /* writes reason */
} ddl__plugin_try;

/* The registry that `amalgamate.py --with` fills. */
static const ddl__plugin_static *ddl__plugin_statics(void) {
    static const ddl__plugin_static statics[] = {
#ifdef DDL__STATIC_PLUGINS
#define DDL__STATIC_PLUGIN(plugin) {#plugin, ddl_plugin_##plugin##_v1},
        DDL__STATIC_PLUGINS(DDL__STATIC_PLUGIN)
#undef DDL__STATIC_PLUGIN
#endif
        {NULL, NULL}};
    return statics;
}

static const char *ddl__plugin_libdir(void) {
#ifdef DDL_PLUGIN_DIR
    return DDL_PLUGIN_DIR;
#else
    return NULL;
#endif
}

/* >>plugin_lists */

/* The loaded plugin of that name, or NULL. A handful of plugins at most: a list is all that is needed. */
static const ddl__plugin_record *ddl__loader_find(const ddl__loader *loader, const char *name) {
    const ddl__plugin_record *record = loader->loaded;
    while (record != NULL && strcmp(record->name, name) != 0) {
        record = record->next;
    }
    return record;
}

/* By path, not by name: another file of the same name may well be usable. */
static const ddl__plugin_record *ddl__loader_refused(const ddl__loader *loader, const char *path) {
    const ddl__plugin_record *record = loader->refused;
    while (record != NULL && strcmp(record->path, path) != 0) {
        record = record->next;
    }
    return record;
}

/* One block for a record and its strings, so that there is one thing to free and one that can fail. */
static ddl__plugin_record *ddl__plugin_append(ddl__loader *loader, ddl__plugin_record **list,
                                              const ddl__plugin_try *candidate) {
    size_t path_bytes = strlen(candidate->path) + 1, reason_bytes = strlen(candidate->reason) + 1;
    ddl__plugin_record *record = ddl__alloc(loader->base, sizeof *record + path_bytes + reason_bytes);
    if (record == NULL) {
        loader->out_of_memory = true;
        return NULL;
    }
    char *strings = (char *)(record + 1);
    record->path = memcpy(strings, candidate->path, path_bytes);
    record->reason = memcpy(strings + path_bytes, candidate->reason, reason_bytes);
    memcpy(record->name, candidate->name, sizeof record->name);
    record->plugin = candidate->plugin;
    record->handle = candidate->handle;
    while (*list != NULL) {
        list = &(*list)->next;
    }
    *list = record;
    return record;
}

/* >>plugin_entry */

/* A host for one call of an entry function: the last warning is held back. When the plugin then declines, the warning
 * is the reason for it, and no news to a user who never asked for this plugin; else it is logged as it was meant. */
typedef struct ddl__plugin_entry_host {
    ddl_host host; /* first, so that the plugin's pointer to it is one to this */
    const ddl_host *real;
    char warning[DDL__PLUGIN_REASON_BYTES / 2];
} ddl__plugin_entry_host;

static void ddl__plugin_entry_log(const ddl_host *host, ddl_log_level level, const char *line) {
    ddl__plugin_entry_host *entry = (ddl__plugin_entry_host *)(uintptr_t)host;
    if (level != DDL_LOG_WARN) {
        entry->real->log(entry->real, level, line);
        return;
    }
    if (entry->warning[0] != '\0') {
        entry->real->log(entry->real, DDL_LOG_INFO, entry->warning);
    }
    snprintf(entry->warning, sizeof entry->warning, "%s", line);
}

static void *ddl__plugin_entry_alloc(const ddl_host *host, size_t bytes) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->alloc(real, bytes);
}

static void ddl__plugin_entry_free(const ddl_host *host, void *memory) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    real->free(real, memory);
}

static const char *ddl__plugin_entry_setting(const ddl_host *host, const char *name) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->setting(real, name);
}

static uint64_t ddl__plugin_entry_now_ns(const ddl_host *host) {
    const ddl_host *real = ((const ddl__plugin_entry_host *)host)->real;
    return real->now_ns(real);
}

/* Calls the entry. There is no endpoint yet, so that all of the host that needs one is NULL. */
static ddl__plugin_verdict ddl__plugin_call(const ddl__loader *loader, ddl_plugin_fn entry, ddl__plugin_try *out) {
    ddl__plugin_entry_host host = {.real = loader->params->host};
    host.host.size = sizeof host.host;
    host.host.abi = DDL_PLUGIN_ABI;
    host.host.alloc = ddl__plugin_entry_alloc;
    host.host.free = ddl__plugin_entry_free;
    host.host.log = ddl__plugin_entry_log;
    host.host.setting = ddl__plugin_entry_setting;
    host.host.now_ns = ddl__plugin_entry_now_ns;
    const ddl_plugin *plugin = entry(&host.host);
    if (plugin == NULL) {
        ddl__text_add(&out->text, "it declines: %s", host.warning[0] != '\0' ? host.warning : "it gave no reason");
        return DDL__PLUGIN_DECLINED;
    }
    if (host.warning[0] != '\0') {
        host.real->log(host.real, DDL_LOG_WARN, host.warning);
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_table(plugin, out->name, &out->text);
    out->plugin = verdict == DDL__PLUGIN_USABLE ? plugin : NULL;
    return verdict;
}

/* >>plugin_open */

#ifndef DDL_NO_PLUGINS
/* Weak, so that a program links without -ldl where glibc is older than 2.34, and statically: there dlopen is NULL. */
static void *ddl__dlopen(const char *path, int flags) __attribute__((weakref("dlopen")));
static void *ddl__dlsym(void *handle, const char *name) __attribute__((weakref("dlsym")));
static char *ddl__dlerror(void) __attribute__((weakref("dlerror")));

/* Here the plugin's code runs for the first time: its constructors inside dlopen, then its entry. RTLD_NOW finds what
 * is missing now and not in the middle of training; RTLD_LOCAL keeps the names of plugins out of each other's way.
 * A plugin that is refused after this point stays mapped, which is harmless. */
static ddl__plugin_verdict ddl__plugin_open_checked(const ddl__loader *loader, const char *real,
                                                    ddl__plugin_try *out) {
    if (ddl__dlopen == NULL || ddl__dlsym == NULL || ddl__dlerror == NULL) {
        return ddl__plugin_refuse(&out->text, "this program cannot open shared objects; link it with -ldl and without "
                                  "-static");
    }
    out->handle = ddl__dlopen(real, RTLD_NOW | RTLD_LOCAL);
    if (out->handle == NULL) {
        const char *why = ddl__dlerror();
        return ddl__plugin_refuse(&out->text, "dlopen: %s", why != NULL ? why : "no reason given");
    }
    char symbol[DDL__PLUGIN_NAME_BYTES + 16];
    snprintf(symbol, sizeof symbol, "ddl_plugin_%s_v1", out->name);
    void *address = ddl__dlsym(out->handle, symbol);
    if (address == NULL) {
        return ddl__plugin_refuse(&out->text, "it exports no %s", symbol);
    }
    ddl_plugin_fn entry;
    memcpy(&entry, &address, sizeof entry); /* ISO C has no cast between these two kinds of pointer; POSIX does */
    return ddl__plugin_call(loader, entry, out);
}

static ddl__plugin_verdict ddl__plugin_open(const ddl__loader *loader, ddl__plugin_try *out) {
    char real[PATH_MAX];
    if (out->path[0] != '/') {
        return ddl__plugin_refuse(&out->text, "its path is relative; only absolute paths are opened");
    }
    if (!ddl__plugin_name_of(out->path, out->name)) {
        return ddl__plugin_refuse(&out->text, "it is not named libddl-NAME.so with NAME of a-z, 0-9 and _");
    }
    ddl__plugin_verdict verdict = ddl__plugin_check_file(&loader->owners, out->path, real, &out->text);
    return verdict == DDL__PLUGIN_USABLE ? ddl__plugin_open_checked(loader, real, out) : verdict;
}
#else
static ddl__plugin_verdict ddl__plugin_open(const ddl__loader *loader, ddl__plugin_try *out) {
    (void)loader;
    return ddl__plugin_refuse(&out->text, "this program was built without plugins (DDL_NO_PLUGINS)");
}
#endif

/* Puts the outcome on its list and says it in the log. */
static void ddl__plugin_note(ddl__loader *loader, ddl__plugin_verdict verdict, const ddl__plugin_try *candidate) {
    const char *path = candidate->path, *reason = candidate->reason;
    switch (verdict) {
    case DDL__PLUGIN_USABLE:
        if (ddl__plugin_append(loader, &loader->loaded, candidate) != NULL) {
            const char *version = candidate->plugin->version;
            ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s %s: loaded from %s", candidate->name,
                     version != NULL ? version : "", path);
        }
        return;
    case DDL__PLUGIN_ABSENT:
        ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s: %s", path, reason);
        return;
    case DDL__PLUGIN_DECLINED:
        ddl__log(loader->base, DDL_LOG_DEBUG, "plugin %s: %s", path, reason);
        break;
    case DDL__PLUGIN_REFUSED:
        ddl__log(loader->base, DDL_LOG_WARN, "plugin %s is not used: %s", path, reason);
        break;
    }
    ddl__plugin_append(loader, &loader->refused, candidate);
}

/* Looks at a candidate whose path and, when folded in, name are set. What was refused before is not tried again: its
 * code would run twice, and its warning be read twice. */
static ddl__plugin_verdict ddl__plugin_judge(ddl__loader *loader, const ddl__plugin_static *folded,
                                             ddl__plugin_try *out) {
    const ddl__plugin_record *before = ddl__loader_refused(loader, out->path);
    if (before != NULL) {
        return ddl__plugin_refuse(&out->text, "%s", before->reason);
    }
    ddl__plugin_verdict verdict =
        folded != NULL ? ddl__plugin_call(loader, folded->entry, out) : ddl__plugin_open(loader, out);
    /* Two paths may lead to one plugin: what is loaded stays. */
    if (verdict != DDL__PLUGIN_USABLE || ddl__loader_find(loader, out->name) == NULL) {
        ddl__plugin_note(loader, verdict, out);
    }
    return verdict;
}

/* One candidate: a file or, with folded, a part of this program. `tried` collects what happened for the sentence of an
 * error; it may be NULL. */
static bool ddl__plugin_attempt(ddl__loader *loader, const char *path, const ddl__plugin_static *folded,
                                ddl__text *tried) {
    char built_in[DDL__PLUGIN_NAME_BYTES + 16];
    ddl__plugin_try candidate = {.path = path};
    candidate.text = (ddl__text){candidate.reason, sizeof candidate.reason, 0};
    if (folded != NULL) {
        snprintf(built_in, sizeof built_in, "(built in: %s)", folded->name);
        snprintf(candidate.name, sizeof candidate.name, "%s", folded->name);
        candidate.path = built_in;
    }
    ddl__plugin_verdict verdict = ddl__plugin_judge(loader, folded, &candidate);
    if (tried != NULL && verdict != DDL__PLUGIN_USABLE) {
        ddl__text_add(tried, "%s%s (%s)", tried->used > 0 ? ", " : "", candidate.path, candidate.reason);
    }
    return verdict == DDL__PLUGIN_USABLE && !loader->out_of_memory;
}

/* >>plugin_search */

/* Gives the folders of the search one by one: index counts up from 0; false after the last. Relative ones come out too,
 * so that whoever tries a file there says why it is refused. */
static bool ddl__plugin_folder(const ddl__loader_params *params, int index, char out_folder[PATH_MAX]) {
    const char *at = params->path != NULL ? params->path : "";
    for (;; at += *at == ':') {
        size_t bytes = strcspn(at, ":");
        if (bytes == 0 && *at == '\0') {
            break;
        }
        if (bytes > 0 && bytes < PATH_MAX && index-- == 0) {
            memcpy(out_folder, at, bytes);
            out_folder[bytes] = '\0';
            return true;
        }
        at += bytes;
    }
    if (index == 0) {
        ssize_t bytes = readlink("/proc/self/exe", out_folder, PATH_MAX - 1);
        out_folder[bytes > 0 ? bytes : 0] = '\0';
        char *slash = strrchr(out_folder, '/');
        if (slash != NULL) {
            slash[slash == out_folder ? 1 : 0] = '\0';
            return true;
        }
    }
    if (index <= 1 && params->libdir != NULL && params->libdir[0] != '\0') {
        /* Without an executable's folder (no /proc) this one is met twice, which is harmless. */
        ddl__text text = {out_folder, PATH_MAX, 0};
        ddl__text_add(&text, "%s", params->libdir);
        return true;
    }
    return false;
}

#define DDL__PLUGIN_PATH_BYTES (PATH_MAX + DDL__PLUGIN_NAME_BYTES + 16)

static void ddl__plugin_path(char out_path[DDL__PLUGIN_PATH_BYTES], const char *folder, const char *name) {
    ddl__text text = {out_path, DDL__PLUGIN_PATH_BYTES, 0};
    ddl__text_add(&text, "%s/libddl-%s.so", strcmp(folder, "/") == 0 ? "" : folder, name);
}

static const ddl__plugin_static *ddl__plugin_folded(const ddl__loader_params *params, const char *name) {
    const ddl__plugin_static *folded = params->statics;
    while (folded != NULL && folded->name != NULL && strcmp(folded->name, name) != 0) {
        folded++;
    }
    return folded != NULL && folded->name != NULL ? folded : NULL;
}

/* Looks for a plugin that was asked for by name, everywhere until one can be used. */
static bool ddl__loader_by_name(ddl__loader *loader, const char *name, ddl__text *tried) {
    const ddl__plugin_static *folded = ddl__plugin_folded(loader->params, name);
    if (folded != NULL && ddl__plugin_attempt(loader, NULL, folded, tried)) {
        return true;
    }
    char folder[PATH_MAX], path[DDL__PLUGIN_PATH_BYTES];
    for (int i = 0; i < INT_MAX && ddl__plugin_folder(loader->params, i, folder); i++) {
        ddl__plugin_path(path, folder, name);
        if (ddl__plugin_attempt(loader, path, NULL, tried)) {
            return true;
        }
    }
    return false;
}

/* The same lists name transports of the core ("tcp"): nothing to load for these. */
static bool ddl__plugin_is_built_in(const ddl__loader_params *params, const char *name) {
    const char *const *built_in = params->built_in;
    while (built_in != NULL && *built_in != NULL && strcmp(*built_in, name) != 0) {
        built_in++;
    }
    return built_in != NULL && *built_in != NULL;
}

/* One item of a list of what must load. */
static ddl_status ddl__loader_need(ddl__loader *loader, const char *item, const char *source,
                                   ddl__sentence *sentence) {
    char tried_text[DDL__SENTENCE_BYTES - 256];
    ddl__text tried = {tried_text, sizeof tried_text, 0};
    tried_text[0] = '\0';
    if (strchr(item, '/') != NULL) {
        if (ddl__plugin_attempt(loader, item, NULL, &tried)) {
            return DDL_OK;
        }
    } else if (!ddl__plugin_name_ok(item)) {
        return ddl__fail(sentence, DDL_ERR_PLUGIN, "\"%.60s\" of %s is neither the name of a plugin (a-z, 0-9, _) nor "
                         "an absolute path.", item, source);
    } else if (ddl__plugin_is_built_in(loader->params, item) || ddl__loader_find(loader, item) != NULL ||
               ddl__loader_by_name(loader, item, &tried)) {
        return DDL_OK;
    }
    if (loader->out_of_memory) {
        return ddl__fail(sentence, DDL_ERR_NOMEM, "No memory is left to load plugin %.200s.", item);
    }
    return ddl__fail(sentence, DDL_ERR_PLUGIN,
                     "Plugin %.200s, asked for by %s, cannot be used; tried: %s. Repair it or take it off the list.",
                     item, source, tried.used > 0 ? tried_text : "nothing, as there is no folder to search");
}

/* Walks a list: loads what it names and finds the word none. */
static ddl_status ddl__loader_asked(ddl__loader *loader, const ddl__plugin_asked *asked, bool *none,
                                    ddl__sentence *sentence) {
    const char *at = asked->list != NULL ? asked->list : "";
    char item[PATH_MAX];
    while (*at != '\0') {
        at += strspn(at, ", \t");
        size_t bytes = strcspn(at, ",");
        size_t kept = bytes;
        while (kept > 0 && (at[kept - 1] == ' ' || at[kept - 1] == '\t')) {
            kept--;
        }
        if (kept >= sizeof item) {
            return ddl__fail(sentence, DDL_ERR_PLUGIN, "An entry of %s is longer than a path can be.", asked->source);
        }
        memcpy(item, at, kept);
        item[kept] = '\0';
        at += bytes;
        if (strcmp(item, "none") == 0) {
            *none = true;
        } else if (kept > 0) {
            DDL__TRY(ddl__loader_need(loader, item, asked->source, sentence));
        }
    }
    return DDL_OK;
}

typedef struct ddl__plugin_names {
    char name[DDL__PLUGINS_PER_FOLDER][DDL__PLUGIN_NAME_BYTES];
} ddl__plugin_names;

static int ddl__plugin_compare(const void *a, const void *b) { return strcmp(a, b); }

/* Names of the plugins in a folder, sorted: the order of a directory differs between hosts. */
static size_t ddl__plugin_list(const char *folder, ddl__plugin_names *out) {
    size_t count = 0;
    DIR *dir = folder[0] == '/' ? opendir(folder) : NULL;
    if (dir == NULL) {
        return 0;
    }
    for (struct dirent *entry = readdir(dir); entry != NULL && count < DDL__PLUGINS_PER_FOLDER; entry = readdir(dir)) {
        count += ddl__plugin_name_of(entry->d_name, out->name[count]) ? 1 : 0;
    }
    closedir(dir);
    qsort(out->name, count, sizeof out->name[0], ddl__plugin_compare);
    return count;
}

/* Tries what lies in a folder and is not loaded yet. */
static void ddl__loader_scan(ddl__loader *loader, const char *folder) {
    ddl__plugin_names *names = ddl__alloc(loader->base, sizeof *names);
    if (names == NULL) {
        loader->out_of_memory = true;
        return;
    }
    size_t count = ddl__plugin_list(folder, names);
    ddl__log(loader->base, DDL_LOG_DEBUG, "plugins: %zu in %s", count, folder);
    for (size_t i = 0; i < count; i++) {
        char path[DDL__PLUGIN_PATH_BYTES];
        ddl__plugin_path(path, folder, names->name[i]);
        if (ddl__loader_find(loader, names->name[i]) == NULL) { /* an earlier folder wins */
            ddl__plugin_attempt(loader, path, NULL, NULL);
        }
    }
    ddl__free(loader->base, names);
}

/* Nobody asked for these: whatever is wrong with one of them is a warning. */
static void ddl__loader_scan_all(ddl__loader *loader) {
    const ddl__plugin_static *folded = loader->params->statics;
    for (; folded != NULL && folded->name != NULL; folded++) {
        if (ddl__loader_find(loader, folded->name) == NULL) {
            ddl__plugin_attempt(loader, NULL, folded, NULL);
        }
    }
#ifndef DDL_NO_PLUGINS
    char folder[PATH_MAX];
    for (int i = 0; i < INT_MAX && ddl__plugin_folder(loader->params, i, folder); i++) {
        if (folder[0] != '/') {
            ddl__log(loader->base, DDL_LOG_WARN, "the folder \"%s\" of DDL_PLUGIN_PATH is left out: only absolute "
                     "paths are searched", folder);
        }
        ddl__loader_scan(loader, folder);
    }
#endif
}

/* A plugin that was loaded turns out not to work: it is with the refused ones from now on. It stays open. Returns
 * whether it had to load; else the reason is a warning. */
static bool ddl__loader_reject(ddl__loader *loader, const ddl_plugin *plugin, const char *reason) {
    ddl__plugin_record **at = &loader->loaded;
    while ((*at)->plugin != plugin) {
        at = &(*at)->next;
    }
    ddl__plugin_record *record = *at;
    bool needed = record->needed;
    ddl__plugin_try again = {.path = record->path};
    memcpy(again.name, record->name, sizeof again.name);
    snprintf(again.reason, sizeof again.reason, "%s", reason);
    ddl__log(loader->base, needed ? DDL_LOG_DEBUG : DDL_LOG_WARN, "plugin %s is not used: %s", record->path, reason);
    ddl__plugin_append(loader, &loader->refused, &again);
    *at = record->next;
    ddl__free(loader->base, record);
    return needed;
}

/* Forgets the lists. The plugins stay open. */
static void ddl__loader_close(ddl__loader *loader) {
    ddl__plugin_record *lists[2] = {loader->loaded, loader->refused};
    for (int i = 0; i < 2; i++) {
        while (lists[i] != NULL) {
            ddl__plugin_record *next = lists[i]->next;
            ddl__free(loader->base, lists[i]);
            lists[i] = next;
        }
    }
    loader->loaded = loader->refused = NULL;
}

/* Loads what must load, then what else is found. On error the lists tell ddl-info how far it came; the caller closes
 * the loader in either case. */
static ddl_status ddl__loader_open(ddl__loader *loader, ddl__base *base, const ddl__loader_params *params,
                                   ddl__sentence *sentence) {
    struct stat program;
    memset(loader, 0, sizeof *loader);
    loader->base = base;
    loader->params = params;
    loader->owners.self = geteuid();
    loader->owners.program = stat("/proc/self/exe", &program) == 0 ? program.st_uid : loader->owners.self;
    bool none = false;
    ddl_status status = DDL_OK;
    for (size_t i = 0; status == DDL_OK && i < params->asked_count; i++) {
        status = ddl__loader_asked(loader, &params->asked[i], &none, sentence);
    }
    for (ddl__plugin_record *p = loader->loaded; p != NULL; p = p->next) {
        p->needed = true;
    }
    if (status == DDL_OK && !none) {
        ddl__loader_scan_all(loader);
        if (loader->out_of_memory) {
            status = ddl__fail(sentence, DDL_ERR_NOMEM, "No memory is left for the list of plugins.");
        }
    }
    loader->params = NULL; /* it is the caller's and may be gone */
    return status;
}

/* >>mesh/context */
/* mesh, first part: the context, one member of one job. All state hangs off it. There are no globals,
 * but for the shells of contexts that ended: see coll/join.h.
 * Rooms above keep their own parts behind pointers that this room only carries. */

enum {
    DDL__ENDPOINTS_MAX = DDL_STATS_TRANSPORTS,
    DDL__SCRATCH_CLASSES = 4,
    DDL__TOLD = 16, /* threads whose last errors are kept apart */
    DDL__NOTE_BYTES = 1024, /* payload of a usual control message */
    DDL__PASS_NAME_BYTES = 16
};

/* A message of ours: done() is called when the transport needs it no more, unless the send ended at once. */
typedef struct ddl__outgoing {
    ddl_message message; /* first: the transport knows only this */
    void (*done)(ddl_context *c, struct ddl__outgoing *out, ddl_status status);
    void *owner;
    int64_t index;
} ddl__outgoing;

/* A control message with room for its payload. Those of the usual size are reused and never freed before the end. */
typedef struct ddl__note {
    ddl__outgoing out;
    struct ddl__note *next;
    size_t room;
    uint8_t payload[];
} ddl__note;

/* Scratch memory that is kept for the next time. */
typedef struct ddl__scratch {
    size_t bytes;
    struct ddl__scratch *next;
    uint64_t pad[2]; /* the data begins 32 bytes in, aligned for vectors */
} ddl__scratch;

/* A payload on its way in. target NULL: into scratch, and delivered from there when it is whole. */
typedef struct ddl__landing {
    ddl__frame frame;
    void *scratch;
    void *target;
    void *owner; /* of the target: set by the room that placed it */
    int64_t index;
    struct ddl__landing *next;
} ddl__landing;

/* What a room above does with frames of one type. deliver: the payload is whole. place (optional): where it may go
 * directly, NULL for scratch; placed: it is there, or will never be. A negative status closes the link. */
typedef struct ddl__handler {
    ddl_status (*deliver)(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload);
    void *(*place)(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing);
    void (*placed)(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status);
} ddl__handler;

/* One opened transport. */
typedef struct ddl__endpoint {
    const ddl_plugin *plugin;
    const ddl_transport *table;
    void *self;
    ddl_host host; /* host.core is the context */
    bool only_watches; /* TCP that was not asked for: carries nothing, see DDL_TRANSPORT_BLIND */
    uint32_t address_bytes;
    uint8_t address[256];
    ddl_transport_stats stats;
} ddl__endpoint;

typedef enum ddl__life {
    DDL__ALIVE = 0,
    DDL__MISSED = 1, /* its process or its link is gone, without goodbye so far: see detector.h */
    DDL__LEFT = 2,   /* said goodbye */
    DDL__DEAD = 3
} ddl__life;

typedef struct ddl__link {
    ddl__endpoint *endpoint; /* the transport that reaches it; NULL for this rank itself */
    ddl__endpoint *watch;    /* TCP beside a transport that would not notice the end of that host; or NULL */
    bool watching;           /* connected there */
    ddl__life life;
    bool same_host, connected;
    bool same_space;     /* numbers processes as we do: what /proc says of its pid is true */
    bool passes_process; /* it does not, but passes us its process, as we do: see spaces.h */
    bool process_told, board_told, board_taken;
    bool drained; /* left, and its link has ended: nothing more will come */
    bool closing; /* dead, but the transport has not been told yet: not from inside its own calls */
    int32_t host; /* number of its host, from 0 by first appearance */
    int32_t pid, pidfd;
    uint64_t pid_start; /* start time in /proc/pid/stat: a number that was given to a new process does not fool us */
    uint64_t missed_ns; /* when it was missed, or left */
    uint64_t latency_ns, bytes_per_s;
    const char *missed_how;
    char host_id[64], host_name[32];
    uint8_t pass_name[DDL__PASS_NAME_BYTES]; /* where descriptors can be passed to it: see passing.h; 0: nowhere */
} ddl__link;

/* How a link can end, for missed_how; other texts are possible. */
static const char ddl__how_ended[] = "its process ended";
static const char ddl__how_cut[] = "it has not answered for 4 s";
static const char ddl__how_unreached[] =
    "no connection to it could be made; perhaps a firewall drops what goes to its port "
    "(DDL_PORT_RANGE) or its address leads elsewhere (DDL_INTERFACE, DDL_ADVERTISE)";
static const char ddl__how_damaged[] = "it sent damaged bytes";
static const char ddl__how_unexpected[] = "it sent a part of a collective that was not expected";

/* A clock that costs a few nanoseconds, for what is only reported: set right by the real one now and then. */
typedef struct ddl__clock {
    uint64_t ticks, ns; /* of one moment */
    double ns_per_tick;
} ddl__clock;

/* The last error of one thread. */
typedef struct ddl__told {
    pthread_t thread;
    uint64_t number; /* 0: free; the highest is the newest */
    char text[DDL__SENTENCE_BYTES];
} ddl__told;

struct ddl_context {
    ddl__base base;
    ddl__settings settings;
    ddl__loader loader;
    int32_t rank, world_size, host_count, local_ranks, cores;
    volatile unsigned char *own_page; /* empty in a child of fork; NULL where the kernel cannot do that */
    pid_t pid; /* whose context this is: a child of fork gets DDL_ERR_FORK */
    uint64_t job;
    ddl__tuning tuning; /* what new groups begin with: the measured model and DDL_ALGO */
    const char *doing;  /* the public call that is under way, for stall reports; NULL: none */

    pthread_mutex_t lock; /* one lock; everything below is under it */
    pthread_cond_t changed;
    atomic_int lock_waiters; /* relaxed: only a hint to the thread that polls, to let others in */
    int32_t cond_waiters;
    int32_t long_yields;
    int32_t busy_waits; /* so many waits to come are short of polls: see wait.h */
    bool polling, finalized, aborted, joined;
    bool opening; /* a transport that must open */
    bool sleeping; /* the thread that polls is in the kernel, and has not been woken */
    char abort_text[256];
    int32_t wake_fd, epoll_fd;
    int32_t refs; /* the user's handle and every group that the user still holds */
    pthread_t thread;
    bool has_thread, thread_stop;

    ddl__endpoint endpoints[DDL__ENDPOINTS_MAX];
    int32_t endpoint_count;
    ddl__link *links; /* by world rank */
    _Atomic unsigned char *board; /* goodbyes, by world rank: see board.h; NULL: there is none */
    int32_t board_fd;
    _Atomic uint64_t *places; /* on the board too: where each rank waits, see cores.h */
    bool spread, place_pinned;
    int32_t place_core, crowd_looks;
    uint64_t place_ns, moved_ns, move_pause_ns;
    int32_t pass_fd; /* listens for passed descriptors */
    int32_t passing_count;
    uint8_t pass_name[DDL__PASS_NAME_BYTES];
    struct ddl__passing *passings; /* on their way */
    struct ddl__passed *passed;    /* have come */
    ddl__handler handlers[DDL__FRAME_TYPE_MAX + 1];
    int32_t missed_count, closing_count;
    uint64_t next_look_ns; /* when the detector looks again */

    ddl__note *notes;
    int32_t notes_out; /* that a transport still holds */
    ddl__landing *landings;
    ddl__scratch *scratch[DDL__SCRATCH_CLASSES];
    int32_t scratch_count[DDL__SCRATCH_CLASSES];

    struct ddl__lent *lent; /* what ddl_tensor_alloc gave out */
    ddl__clock clock;
    struct ddl__op *natives; /* operations that a transport runs by itself */
    uint32_t polls;
    ddl_group *world;
    struct ddl__groups *groups;
    struct ddl__requests *requests;
    struct ddl__ops *ops;
    uint64_t called; /* collectives that this rank has begun, of all groups */
    ddl_stats stats;
    ddl__sentence error; /* the newest, and what each thread was told */
    pthread_mutex_t error_lock;
    ddl__told told[DDL__TOLD];
    uint64_t told_count;
};

/* Writes the error that ddl_error shows. */
#define ddl__error(c, status, ...) ddl__said((c), ddl__fail(&(c)->error, (status), __VA_ARGS__))

/* Keeps the newest sentence for the calling thread: others that fail meanwhile do not change what it reads. The thread
 * whose error is oldest gives up its place. */
static ddl_status ddl__said(ddl_context *c, ddl_status status) {
    pthread_mutex_lock(&c->error_lock);
    ddl__told *mine = &c->told[0];
    for (int32_t i = 0; i < DDL__TOLD; i++) {
        ddl__told *t = &c->told[i];
        if (t->number > 0 && pthread_equal(t->thread, pthread_self())) {
            mine = t;
            break;
        }
        mine = t->number < mine->number ? t : mine;
    }
    mine->thread = pthread_self();
    mine->number = ++c->told_count;
    memcpy(mine->text, c->error.text, sizeof mine->text);
    pthread_mutex_unlock(&c->error_lock);
    return status;
}

/* ddl__tune_parse, and who asked for it. */
static ddl_status ddl__tune_set(ddl_context *c, ddl__tuning *tuning, const char *text, const char *what) {
    ddl__sentence why;
    ddl_status status = ddl__tune_parse(tuning, text, &why);
    return status < 0 ? ddl__error(c, status, "%s: %s", what, why.text) : status;
}

/* >>clock */

static inline uint64_t ddl__ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return ddl__now_ns();
#endif
}

/* Measures the length of a tick since the last time, unless that is too short ago to tell. */
static uint64_t ddl__clock_set(ddl_context *c) {
    uint64_t ticks = ddl__ticks(), ns = ddl__now_ns();
    if (ns - c->clock.ns > DDL__NS_PER_MS / 2 && ticks > c->clock.ticks) {
        c->clock.ns_per_tick = (double)(ns - c->clock.ns) / (double)(ticks - c->clock.ticks);
        c->clock.ticks = ticks;
        c->clock.ns = ns;
    }
    return ns;
}

/* The time, wrong by a few microseconds at most: the real clock is asked once a millisecond. */
static inline uint64_t ddl__about_ns(ddl_context *c) {
    double since = (double)(int64_t)(ddl__ticks() - c->clock.ticks) * c->clock.ns_per_tick;
    return since > 0 && since < (double)DDL__NS_PER_MS ? c->clock.ns + (uint64_t)(int64_t)since : ddl__clock_set(c);
}

/* >>lock */

/* Mostly nobody else has it. */
static inline void ddl__lock(ddl_context *c) {
    if (pthread_mutex_trylock(&c->lock) == 0) {
        return;
    }
    atomic_fetch_add_explicit(&c->lock_waiters, 1, memory_order_relaxed);
    pthread_mutex_lock(&c->lock);
    atomic_fetch_sub_explicit(&c->lock_waiters, 1, memory_order_relaxed);
}

static inline void ddl__unlock(ddl_context *c) { pthread_mutex_unlock(&c->lock); }

/* A page that the kernel empties in a child of fork: to ask it costs a load, getpid a system call each time. */
static void ddl__own_page_make(ddl_context *c) {
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, bytes, MADV_WIPEONFORK) == 0) {
        c->own_page = page;
        *c->own_page = 1;
    } else if (page != MAP_FAILED) {
        munmap(page, bytes);
    }
}

static inline bool ddl__is_forked(const ddl_context *c) {
    return c->own_page != NULL ? *c->own_page == 0 : c->pid != getpid();
}

/* Begins a public call: checks that the context may be used, and locks it. */
static inline ddl_status ddl__enter(ddl_context *c) {
    if (c == NULL) {
        return DDL_ERR_ARG;
    }
    if (ddl__is_forked(c)) {
        return DDL_ERR_FORK; /* the lock may be held for ever by a thread that this process has not */
    }
    ddl__lock(c);
    if (c->finalized) {
        ddl_status status = ddl__error(c, DDL_ERR_STATE, "the context was finalized; nothing can be started on it");
        ddl__unlock(c);
        return status;
    }
    return DDL_OK;
}

DDL_API const char *ddl_error(const ddl_context *context) {
    ddl_context *c = (ddl_context *)(uintptr_t)context;
    if (c == NULL) {
        return "";
    }
    if (ddl__is_forked(c)) { /* the parent's words, and a lock that may be held for ever */
        return "the context belongs to the parent process, a child of fork cannot use it; start processes before "
               "ddl_init, or call ddl_init in the child";
    }
    pthread_mutex_lock(&c->error_lock);
    const ddl__told *found = NULL;
    for (int32_t i = 0; i < DDL__TOLD; i++) {
        const ddl__told *t = &c->told[i];
        bool mine = t->number > 0 && pthread_equal(t->thread, pthread_self());
        if (mine || found == NULL || t->number > found->number) {
            found = t;
        }
        if (mine) {
            break;
        }
    }
    pthread_mutex_unlock(&c->error_lock);
    return found->text;
}

/* Refuses a call that was given NULL where something must be. c may be NULL too: then there is nowhere to say why. */
static ddl_status ddl__refuse(ddl_context *c, const char *what, const char *which) {
    DDL__TRY(ddl__enter(c));
    ddl_status status = ddl__error(c, DDL_ERR_ARG, "%s: %s is NULL", what, which);
    ddl__unlock(c);
    return status;
}

/* Wakes the thread that polls, when it sleeps: another one did something that it may be waiting for, or that needs
 * it. */
static void ddl__kick(ddl_context *c) {
    uint64_t one = 1;
    if (c->sleeping) {
        c->sleeping = false;
        if (c->wake_fd >= 0 && write(c->wake_fd, &one, sizeof one) < 0) {
            return; /* full: it wakes anyway */
        }
    }
}

/* >>memory */

/* Memory of one class is of one size, but for the last, which is of any. Many small pieces are in use at once:
 * frames that came early; their sizes differ from time to time, the number of each class hardly. */
static const size_t ddl__scratch_bytes[DDL__SCRATCH_CLASSES - 1] = {256, 4096, 65536};
static const int32_t ddl__scratch_kept[DDL__SCRATCH_CLASSES] = {256, 64, 32, 8};

static int32_t ddl__scratch_class(size_t bytes) {
    int32_t i = 0;
    while (i < DDL__SCRATCH_CLASSES - 1 && bytes > ddl__scratch_bytes[i]) {
        i++;
    }
    return i;
}

/* At least bytes bytes, not zeroed, aligned to 16; NULL when there is no memory. The smallest that fits is taken. */
static void *ddl__scratch_get(ddl_context *c, size_t bytes) {
    int32_t size_class = ddl__scratch_class(bytes);
    bool fixed = size_class < DDL__SCRATCH_CLASSES - 1;
    ddl__scratch **best = NULL;
    ddl__scratch **at = &c->scratch[size_class];
    for (; *at != NULL && !(fixed && best != NULL); at = &(*at)->next) {
        if ((*at)->bytes >= bytes && (best == NULL || (*at)->bytes < (*best)->bytes)) {
            best = at;
        }
    }
    if (best != NULL) {
        ddl__scratch *s = *best;
        *best = s->next;
        c->scratch_count[size_class]--;
        return s + 1;
    }
    size_t rounded = fixed ? ddl__scratch_bytes[size_class] : bytes;
    ddl__scratch *s = rounded > SIZE_MAX - sizeof *s ? NULL : ddl__alloc(&c->base, sizeof *s + rounded);
    if (s == NULL) {
        return NULL;
    }
    s->bytes = rounded;
    return s + 1;
}

/* Some of each size_class are kept, of the last one the largest. */
static void ddl__scratch_put(ddl_context *c, void *memory) {
    if (memory == NULL) {
        return;
    }
    ddl__scratch *s = (ddl__scratch *)memory - 1;
    int32_t size_class = ddl__scratch_class(s->bytes);
    s->next = c->scratch[size_class];
    c->scratch[size_class] = s;
    if (++c->scratch_count[size_class] <= ddl__scratch_kept[size_class]) {
        return;
    }
    ddl__scratch **least = &c->scratch[size_class];
    for (ddl__scratch **at = least; size_class == DDL__SCRATCH_CLASSES - 1 && *at != NULL; at = &(*at)->next) {
        if ((*at)->bytes < (*least)->bytes) {
            least = at;
        }
    }
    ddl__scratch *gone = *least;
    *least = gone->next;
    c->scratch_count[size_class]--;
    ddl__free(&c->base, gone);
}

static void ddl__scratch_free_all(ddl_context *c) {
    for (int32_t size_class = 0; size_class < DDL__SCRATCH_CLASSES; size_class++) {
        while (c->scratch[size_class] != NULL) {
            ddl__scratch *s = c->scratch[size_class];
            c->scratch[size_class] = s->next;
            ddl__free(&c->base, s);
        }
    }
}

static ddl__landing *ddl__landing_get(ddl_context *c) {
    ddl__landing *l = c->landings;
    if (l == NULL) {
        return ddl__alloc(&c->base, sizeof *l);
    }
    c->landings = l->next;
    memset(l, 0, sizeof *l);
    return l;
}

static void ddl__landing_put(ddl_context *c, ddl__landing *l) {
    ddl__scratch_put(c, l->scratch);
    l->scratch = NULL;
    l->next = c->landings;
    c->landings = l;
}

/* >>mesh/host */
/* mesh, second part: what transports call. Messages leave and arrive here; frames are checked once and handed to the
 * room that registered for their type. */

static void ddl__missed(ddl_context *c, int32_t peer, const char *how);
static ddl_status ddl__host_send_fd(const ddl_host *host, int32_t peer, uint64_t tag, int fd);
static ddl_status ddl__host_take_fd(const ddl_host *host, int32_t peer, uint64_t tag, int *out_fd);

static ddl_context *ddl__core(const ddl_host *host) { return host->core; }

static void *ddl__host_alloc(const ddl_host *host, size_t bytes) { return ddl__alloc(&ddl__core(host)->base, bytes); }

static void ddl__host_free(const ddl_host *host, void *memory) { ddl__free(&ddl__core(host)->base, memory); }

/* While a transport opens that must, a warning may be why it does not. Then the sentence of the error tells it, once;
 * else it is logged when the next one comes, or when the transport is open. */
static void ddl__opening_warned(ddl_context *c) {
    if (c->opening && c->error.text[0] != 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "%s", c->error.text);
        c->error.text[0] = 0;
    }
}

/* The start of a job is one line, ddl__announce's. Only a transport that was asked for may say more, on rank 0. */
static void ddl__host_log(const ddl_host *host, ddl_log_level level, const char *line) {
    ddl_context *c = ddl__core(host);
    if (level == DDL_LOG_WARN && !c->joined) {
        ddl__opening_warned(c);
        ddl__error(c, DDL_ERR_SYSTEM, "%s", line);
    }
    if (level != DDL_LOG_WARN || !c->opening) {
        bool quiet = level == DDL_LOG_INFO && !c->joined && (!c->opening || c->rank != 0);
        ddl__log(&c->base, quiet ? DDL_LOG_DEBUG : level, "%s", line);
    }
}

static const char *ddl__host_setting(const ddl_host *host, const char *name) {
    (void)host;
    return ddl__plugin_setting(name);
}

static uint64_t ddl__host_now(const ddl_host *host) {
    (void)host;
    return ddl__now_ns();
}

/* >>in */

static ddl_status ddl__host_frame(ddl_context *c, int32_t peer, const uint8_t *header, ddl__frame *out) {
    ddl_status status = ddl__frame_read(header, out);
    if (status == DDL_OK && (out->source != (uint32_t)peer || c->handlers[out->type].deliver == NULL)) {
        status = DDL_ERR_CORRUPT;
    }
    if (status < 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "damaged bytes arrived from rank %d (%s); its link is closed", peer,
                 ddl_status_text(status));
        return DDL_ERR_CORRUPT;
    }
    return DDL_OK;
}

static ddl_status ddl__host_measure(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes) {
    ddl__frame f;
    DDL__TRY(ddl__host_frame(ddl__core(host), peer, header, &f));
    *out_bytes = f.bytes;
    return DDL_OK;
}

/* A link is used for the first time. Where its transport is blind, the other host is watched from now on. */
static void ddl__link_used(ddl_context *c, int32_t peer) {
    ddl__link *l = &c->links[peer];
    l->connected = true;
    if (l->watch != NULL && !l->watching) {
        l->watching = true;
        l->watch->table->connect(l->watch->self, peer);
    }
}

static void ddl__count_sent(ddl_context *c, int32_t peer, uint64_t bytes) {
    ddl_transport_stats *t = &c->links[peer].endpoint->stats;
    c->stats.messages_sent++;
    c->stats.bytes_sent += bytes;
    t->messages_sent++;
    t->bytes_sent += bytes;
}

static void ddl__count_received(ddl_context *c, int32_t peer, uint64_t bytes) {
    ddl__endpoint *e = c->links[peer].endpoint;
    c->stats.messages_received++;
    c->stats.bytes_received += bytes;
    if (e != NULL) {
        e->stats.messages_received++;
        e->stats.bytes_received += bytes;
    }
}

static ddl_status ddl__arrived(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    if ((f->flags & DDL__FRAME_FLAG_CRC) != 0 && !ddl__frame_payload_ok(f, payload)) {
        ddl__log(&c->base, DDL_LOG_WARN, "a payload of %u bytes from rank %d does not match its checksum; its link is "
                 "closed", f->bytes, peer);
        return DDL_ERR_CORRUPT;
    }
    ddl__link_used(c, peer);
    ddl__count_received(c, peer, f->bytes);
    return c->handlers[f->type].deliver(c, peer, f, payload);
}

static ddl_status ddl__host_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                                    uint64_t payload_bytes) {
    ddl_context *c = ddl__core(host);
    ddl__frame f;
    DDL__TRY(ddl__host_frame(c, peer, header, &f));
    return f.bytes == payload_bytes ? ddl__arrived(c, peer, &f, payload) : DDL_ERR_CORRUPT;
}

static ddl_status ddl__host_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                                 void **out_landing, void **out_token) {
    ddl_context *c = ddl__core(host);
    ddl__landing *l = ddl__landing_get(c);
    if (l == NULL) {
        return DDL_ERR_NOMEM;
    }
    ddl_status status = ddl__host_frame(c, peer, header, &l->frame);
    const ddl__handler *h = &c->handlers[l->frame.type];
    bool direct = (l->frame.flags & DDL__FRAME_FLAG_CRC) == 0 && DDL_HAS(c->links[peer].endpoint->table, redirect);
    if (status == DDL_OK && h->place != NULL && direct) {
        l->target = h->place(c, peer, &l->frame, l);
    }
    if (status == DDL_OK && l->target == NULL) {
        l->scratch = ddl__scratch_get(c, l->frame.bytes);
        status = l->scratch == NULL ? DDL_ERR_NOMEM : DDL_OK;
    }
    if (status < 0) {
        ddl__landing_put(c, l);
        return status;
    }
    *out_bytes = l->frame.bytes;
    *out_landing = l->target != NULL ? l->target : l->scratch;
    *out_token = l;
    return DDL_OK;
}

static void ddl__host_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    ddl_context *c = ddl__core(host);
    ddl__landing *l = token;
    if (l->target != NULL) {
        if (status == DDL_OK) {
            ddl__count_received(c, peer, l->frame.bytes);
        }
        c->handlers[l->frame.type].placed(c, peer, l, status);
    } else if (status == DDL_OK && ddl__arrived(c, peer, &l->frame, l->scratch) < 0) {
        ddl__missed(c, peer, ddl__how_damaged);
    }
    ddl__landing_put(c, l);
}

/* The memory that a landing goes to belongs to an operation that ends now: the rest is discarded. */
static void ddl__landing_abandon(ddl_context *c, int32_t peer, ddl__landing *l) {
    ddl__endpoint *e = c->links[peer].endpoint;
    l->scratch = ddl__scratch_get(c, l->frame.bytes);
    l->target = l->scratch;
    e->table->redirect(e->self, peer, l, l->scratch);
}

/* >>out */

static void ddl__host_sent(const ddl_host *host, ddl_message *message, ddl_status status) {
    ddl__outgoing *out = (ddl__outgoing *)message;
    if (out->done != NULL) {
        out->done(ddl__core(host), out, status);
    }
}

static ddl__note *ddl__note_get(ddl_context *c, size_t bytes);
static void ddl__note_done(ddl_context *c, ddl__outgoing *out, ddl_status status);

static ddl_status ddl__send(ddl_context *c, int32_t peer, ddl_message *message) {
    ddl__endpoint *e = c->links[peer].endpoint;
    ddl_status status = e->table->send(e->self, peer, message);
    if (status == DDL_IN_PROGRESS) {
        ddl__kick(c); /* a sleeper does not know yet that there is something to write */
    }
    return status;
}

/* For a transport that cannot give memory back (no recall): it gets a copy, so that the operation may end first. */
static ddl_status ddl__send_copy(ddl_context *c, int32_t peer, const ddl_message *message) {
    ddl__note *n = ddl__note_get(c, message->payload_bytes);
    if (n == NULL) {
        return DDL_ERR_NOMEM;
    }
    n->out.done = ddl__note_done;
    c->notes_out++;
    memcpy(n->out.message.header, message->header, sizeof message->header);
    n->out.message.payload = n->payload;
    n->out.message.payload_bytes = message->payload_bytes;
    if (message->payload_bytes > 0) {
        memcpy(n->payload, message->payload, message->payload_bytes);
    }
    ddl_status status = ddl__send(c, peer, &n->out.message);
    if (status == DDL_IN_PROGRESS) {
        return DDL_OK;
    }
    ddl__note_done(c, &n->out, status);
    return status;
}

/* Sends a frame whose payload stays where it is until out->done. DDL_OK: done() will not be called. */
static ddl_status ddl__post(ddl_context *c, int32_t peer, ddl__outgoing *out, ddl__frame *f, const void *payload) {
    ddl__link *l = &c->links[peer];
    if (l->life == DDL__DEAD || l->life == DDL__LEFT || l->endpoint == NULL) {
        return DDL_ERR_PEER;
    }
    f->source = (uint32_t)c->rank;
    if (c->settings.check_payload && f->bytes > 0) {
        f->flags |= DDL__FRAME_FLAG_CRC;
        f->payload_crc = ddl__crc32c(0, payload, f->bytes);
    }
    ddl__frame_write(out->message.header, f);
    out->message.payload = payload;
    out->message.payload_bytes = f->bytes;
    ddl__link_used(c, peer);
    ddl__count_sent(c, peer, f->bytes);
    bool copy = out->done != ddl__note_done && !DDL_HAS(l->endpoint->table, recall);
    return copy ? ddl__send_copy(c, peer, &out->message) : ddl__send(c, peer, &out->message);
}

/* Takes a message back from the transport before its memory goes away. */
static void ddl__recall(ddl_context *c, int32_t peer, ddl__outgoing *out) {
    ddl__endpoint *e = c->links[peer].endpoint;
    if (DDL_HAS(e->table, recall)) {
        e->table->recall(e->self, peer, &out->message);
    }
}

static ddl__note *ddl__note_get(ddl_context *c, size_t bytes) {
    ddl__note *n = c->notes;
    if (n != NULL && bytes <= DDL__NOTE_BYTES) {
        c->notes = n->next;
        return n;
    }
    size_t room = DDL__MAX(bytes, (size_t)DDL__NOTE_BYTES);
    n = ddl__alloc(&c->base, sizeof *n + room);
    if (n != NULL) {
        n->room = room;
    }
    return n;
}

static void ddl__note_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    (void)status;
    ddl__note *n = (ddl__note *)out;
    c->notes_out--;
    if (n->room > DDL__NOTE_BYTES) {
        ddl__free(&c->base, n);
        return;
    }
    n->next = c->notes;
    c->notes = n;
}

/* Sends a control message of at most a frame: the payload is copied. DDL_ERR_NOMEM: it was not sent; what depends on it
 * is to fail, or finds out by its own deadline. A peer that cannot be reached is no error here: its death ends what
 * needs it. */
static ddl_status ddl__tell(ddl_context *c, int32_t peer, ddl__frame f, const void *payload, size_t bytes) {
    ddl__note *n = bytes <= DDL__FRAME_MAX_PAYLOAD ? ddl__note_get(c, bytes) : NULL;
    if (n == NULL) {
        ddl__log(&c->base, DDL_LOG_WARN, "no memory for a control message of %zu bytes to rank %d", bytes, peer);
        return DDL_ERR_NOMEM;
    }
    n->out.done = ddl__note_done;
    c->notes_out++;
    f.bytes = (uint32_t)bytes;
    if (bytes > 0) {
        memcpy(n->payload, payload, bytes);
    }
    if (ddl__post(c, peer, &n->out, &f, n->payload) != DDL_IN_PROGRESS) {
        ddl__note_done(c, &n->out, DDL_OK);
    }
    return DDL_OK;
}

/* >>proof */

/* Runs the handshake for a transport; the secret stays here. See docs/plugins.md for the calling sequence. */
static ddl_status ddl__host_prove(const ddl_host *host, void **state, int32_t is_client, int32_t peer,
                                  const uint8_t *in, size_t in_bytes, size_t *out_used, uint8_t *out, size_t *out_bytes,
                                  int32_t *out_peer) {
    ddl_context *c = ddl__core(host);
    ddl__auth *a = *state;
    if (out != NULL) {
        *out_used = *out_bytes = 0;
    }
    if (in == NULL && out == NULL) {
        if (a != NULL) { /* given up half-way, by us or by a stranger who saw that our secret is another */
            c->stats.strangers_refused += is_client ? 0 : 1;
            ddl__auth_wipe(a);
            ddl__free(&c->base, a);
            *state = NULL;
        }
        return DDL_OK;
    }
    ddl_status status = DDL_OK;
    if (a == NULL) {
        uint8_t nonce[32];
        ddl__auth_params p = {.secret = c->settings.secret,
                              .secret_bytes = c->settings.secret_bytes,
                              .job = c->job,
                              .purpose = DDL__AUTH_MESH,
                              .rank = (uint32_t)c->rank,
                              .peer = (uint32_t)peer,
                              .world = (uint32_t)c->world_size};
        a = ddl__alloc(&c->base, sizeof *a);
        if (a == NULL) {
            return DDL_ERR_NOMEM;
        }
        *state = a;
        status = ddl__random(nonce, sizeof nonce);
        if (status == DDL_OK) {
            status = is_client ? ddl__auth_client(a, &p, nonce) : ddl__auth_server(a, &p, nonce);
        }
    }
    if (status == DDL_OK) {
        status = ddl__auth_step(a, in, in_bytes, out_used, out, 256, out_bytes);
    }
    if (status == DDL_OK) {
        *out_peer = (int32_t)a->peer_rank;
    } else if (status < 0) {
        c->stats.strangers_refused += is_client ? 0 : 1;
    }
    if (status != DDL_IN_PROGRESS) {
        ddl__auth_wipe(a);
        ddl__free(&c->base, a);
        *state = NULL;
    }
    return status;
}

/* Values for transports that mark each message. Neither the secret nor a key of the handshake can be got from them. */
static ddl_status ddl__host_derive(const ddl_host *host, const void *data, size_t bytes, uint8_t out[32]) {
    ddl_context *c = ddl__core(host);
    static const char label[] = "ddl plugin mark"; /* 16 bytes, as those of the handshake, and none of them */
    ddl__hmac_key key;
    ddl__sha256 h;
    uint8_t job[8];
    if (c->settings.secret == NULL) {
        return DDL_ERR_UNSUPPORTED;
    }
    ddl__store_le64(job, c->job);
    ddl__hmac_key_init(&key, c->settings.secret, c->settings.secret_bytes);
    ddl__hmac_begin(&h, &key);
    ddl__sha256_update(&h, label, sizeof label);
    ddl__sha256_update(&h, job, sizeof job);
    ddl__sha256_update(&h, data, bytes);
    ddl__hmac_end(&h, &key, out);
    ddl__wipe(&key, sizeof key);
    return DDL_OK;
}

static void ddl__host_lost(const ddl_host *host, int32_t peer, int32_t system_error, const char *what) {
    ddl_context *c = ddl__core(host);
    const ddl__link *l = &c->links[peer];
    if (l->watch != NULL && host == &l->watch->host && system_error == ENOTCONN) {
        ddl__log(&c->base, DDL_LOG_WARN,
                 "rank %d on host %s cannot be reached over TCP, which would show the end of its host; a cut link is "
                 "noticed by deadlines alone. Open the ports (DDL_PORT_RANGE)",
                 peer, l->host_name);
        return;
    }
    ddl__log(&c->base, DDL_LOG_DEBUG, "link to rank %d: %s%s%s", peer, what, system_error != 0 ? ": " : "",
             system_error != 0 ? strerror(system_error) : "");
    switch (system_error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
        ddl__missed(c, peer, ddl__how_cut);
        break;
    case ENOTCONN:
        ddl__missed(c, peer, ddl__how_unreached);
        break;
    case EBADMSG:
        ddl__missed(c, peer, ddl__how_damaged);
        break;
    default:
        ddl__missed(c, peer, ddl__how_ended);
    }
}

static void ddl__host_transferred(const ddl_host *host, void *cookie, ddl_status status) {
    ddl__host_sent(host, cookie, status);
}

static ddl_host ddl__host_table(ddl_context *c) {
    return (ddl_host){
        .size = sizeof(ddl_host),
        .abi = DDL_PLUGIN_ABI,
        .core = c,
        .alloc = ddl__host_alloc,
        .free = ddl__host_free,
        .log = ddl__host_log,
        .setting = ddl__host_setting,
        .now_ns = ddl__host_now,
        .deliver = ddl__host_deliver,
        .land = ddl__host_land,
        .landed = ddl__host_landed,
        .sent = ddl__host_sent,
        .transferred = ddl__host_transferred,
        .lost = ddl__host_lost,
        .prove = ddl__host_prove,
        .send_fd = ddl__host_send_fd,
        .take_fd = ddl__host_take_fd,
        .measure = ddl__host_measure,
        .derive = ddl__host_derive,
    };
}

/* >>mesh/passing */
/* mesh: passing file descriptors between the ranks of a host, for memory and devices that plugins share. Each rank
 * listens on an abstract unix socket with a random name; to pass one, a rank connects, both sides prove that they are
 * of this job and this user, then the descriptor and a tag go over and the connection ends. Nothing here blocks. */

enum { DDL__PASSINGS_MAX = 256, DDL__PASSING_EVENT = 0x7fffffff };
#define DDL__PASSING_NS (5 * DDL__NS_PER_S) /* from connecting to the end, else it is given up */

/* A descriptor on its way out or in. */
typedef struct ddl__passing {
    struct ddl__passing *next;
    int fd;       /* the connection; -1: not connected yet */
    int32_t peer; /* -1 while a stranger */
    bool is_client, proven;
    void *proof;
    uint64_t tag;
    int passed; /* what goes out; -1: the tag alone */
    uint64_t since_ns;
} ddl__passing;

/* One that has come, until it is taken. */
typedef struct ddl__passed {
    struct ddl__passed *next;
    int32_t peer;
    uint64_t tag;
    int fd;
} ddl__passed;

static socklen_t ddl__pass_address(const uint8_t name[DDL__PASS_NAME_BYTES], struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    memcpy(out->sun_path + 1, "ddl-pass-", 9); /* after a 0: the name is abstract, no file */
    for (int32_t i = 0; i < DDL__PASS_NAME_BYTES; i++) {
        snprintf(out->sun_path + 10 + 2 * i, 3, "%02x", name[i]);
    }
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 10 + 2 * DDL__PASS_NAME_BYTES);
}

/* Without a listener there is no passing: the name stays all 0, which peers know. */
static void ddl__pass_open(ddl_context *c) {
    struct sockaddr_un address;
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = DDL__PASSING_EVENT}};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || ddl__random(c->pass_name, sizeof c->pass_name) < 0 ||
        bind(fd, (struct sockaddr *)&address, ddl__pass_address(c->pass_name, &address)) != 0 ||
        listen(fd, DDL__PASSINGS_MAX) != 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "no descriptors can be passed on this host: %s", strerror(errno));
        memset(c->pass_name, 0, sizeof c->pass_name);
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    c->pass_fd = fd;
}

static ddl__passing *ddl__passing_new(ddl_context *c, int32_t peer, bool is_client) {
    ddl__passing *p = c->passing_count < DDL__PASSINGS_MAX ? ddl__alloc(&c->base, sizeof *p) : NULL;
    if (p != NULL) {
        *p = (ddl__passing){.next = c->passings, .fd = -1, .peer = peer, .is_client = is_client, .passed = -1,
                            .since_ns = ddl__now_ns()};
        c->passings = p;
        c->passing_count++;
    }
    return p;
}

static void ddl__passing_free(ddl_context *c, ddl__passing *p) {
    for (ddl__passing **at = &c->passings; *at != NULL; at = &(*at)->next) {
        if (*at == p) {
            *at = p->next;
            c->passing_count--;
            break;
        }
    }
    if (p->proof != NULL) {
        ddl__host_prove(&c->endpoints[0].host, &p->proof, p->is_client, p->peer, NULL, 0, NULL, NULL, NULL, NULL);
    }
    if (p->fd >= 0) {
        close(p->fd);
    }
    if (p->passed >= 0) {
        close(p->passed);
    }
    ddl__free(&c->base, p);
}

static void ddl__pass_watch(ddl_context *c, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = DDL__PASSING_EVENT}};
    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* >>moving */

/* Connects. DDL_IN_PROGRESS: the peer's queue is full, again later. */
static ddl_status ddl__passing_connect(ddl_context *c, ddl__passing *p) {
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return DDL_ERR_SYSTEM;
    }
    socklen_t bytes = ddl__pass_address(c->links[p->peer].pass_name, &address);
    if (connect(fd, (struct sockaddr *)&address, bytes) != 0 || !ddl__tcp_same_user(fd)) {
        bool full = errno == EAGAIN;
        close(fd);
        return full ? DDL_IN_PROGRESS : DDL_ERR_SYSTEM;
    }
    p->fd = fd;
    ddl__pass_watch(c, fd);
    return DDL_OK;
}

static ddl_status ddl__passing_send(const ddl__passing *p) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    uint8_t tag[8];
    ddl__store_le64(tag, p->tag);
    struct iovec iov = {tag, sizeof tag};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (p->passed >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(head), &p->passed, sizeof p->passed);
    }
    return sendmsg(p->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof tag ? DDL_OK : DDL_ERR_SYSTEM;
}

/* The descriptors of a message; all but the first are closed: nobody sends more. */
static int ddl__passed_fd(struct msghdr *message) {
    int fd = -1;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head != NULL; head = CMSG_NXTHDR(message, head)) {
        size_t count = head->cmsg_type == SCM_RIGHTS ? (head->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < count; i++) {
            int one;
            memcpy(&one, CMSG_DATA(head) + i * sizeof one, sizeof one);
            if (fd < 0) {
                fd = one;
            } else {
                close(one);
            }
        }
    }
    return fd;
}

static ddl_status ddl__passing_receive(ddl_context *c, const ddl__passing *p) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    uint8_t tag[8];
    struct iovec iov = {tag, sizeof tag};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(p->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return DDL_IN_PROGRESS;
    }
    int fd = n > 0 ? ddl__passed_fd(&message) : -1;
    ddl__passed *passed = n == (ssize_t)sizeof tag ? ddl__alloc(&c->base, sizeof *passed) : NULL;
    if (passed == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return DDL_ERR_SYSTEM;
    }
    *passed = (ddl__passed){.next = c->passed, .peer = p->peer, .tag = ddl__load_le64(tag), .fd = fd};
    c->passed = passed;
    return DDL_OK;
}

/* One step of one passing. DDL_OK: it is done; DDL_IN_PROGRESS, or an error. */
static ddl_status ddl__passing_step(ddl_context *c, ddl__passing *p) {
    ddl_status status = p->fd < 0 ? ddl__passing_connect(c, p) : DDL_OK;
    if (status == DDL_OK && !p->proven) {
        status = ddl__tcp_handshake(&c->endpoints[0].host, p->fd, p->is_client, &p->proof, &p->peer);
        p->proven = status == DDL_OK;
        status = p->proven && !c->links[p->peer].same_host ? DDL_ERR_CORRUPT : status;
    }
    if (status != DDL_OK) {
        return status;
    }
    return p->is_client ? ddl__passing_send(p) : ddl__passing_receive(c, p);
}

static void ddl__pass_accept(ddl_context *c) {
    int fd;
    while ((fd = accept4(c->pass_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        ddl__passing *p = ddl__tcp_same_user(fd) ? ddl__passing_new(c, -1, false) : NULL;
        if (p == NULL) {
            c->stats.strangers_refused++;
            close(fd);
            continue;
        }
        p->fd = fd;
        ddl__pass_watch(c, fd);
    }
}

/* Moves all passings along. */
static void ddl__pass_progress(ddl_context *c) {
    if (c->pass_fd < 0) {
        return;
    }
    ddl__pass_accept(c);
    uint64_t now = ddl__now_ns();
    for (ddl__passing *p = c->passings, *next; p != NULL; p = next) {
        next = p->next;
        ddl_status status = ddl__passing_step(c, p);
        if (status == DDL_IN_PROGRESS && now - DDL__MIN(p->since_ns, now) < DDL__PASSING_NS) {
            continue;
        }
        if (status != DDL_OK) {
            ddl__log(&c->base, DDL_LOG_DEBUG, "a descriptor could not be passed %s rank %d: %s",
                     p->is_client ? "to" : "from", p->peer, ddl_status_text(status));
        }
        ddl__passing_free(c, p);
    }
}

/* Is something of this rank's still on its way? What its peer does not take is given up after a while. */
static bool ddl__pass_is_sending(const ddl_context *c) {
    const ddl__passing *p = c->passings;
    while (p != NULL && !p->is_client) {
        p = p->next;
    }
    return p != NULL;
}

/* >>host */

/* Whether both sides listen. */
static bool ddl__can_pass(const ddl_context *c, int32_t peer) {
    static const uint8_t none[DDL__PASS_NAME_BYTES] = {0};
    const ddl__link *l = &c->links[peer];
    return c->pass_fd >= 0 && l->same_host && peer != c->rank && memcmp(l->pass_name, none, sizeof none) != 0;
}

static ddl_status ddl__host_send_fd(const ddl_host *host, int32_t peer, uint64_t tag, int fd) {
    ddl_context *c = ddl__core(host);
    if (!ddl__can_pass(c, peer)) {
        return DDL_ERR_UNSUPPORTED;
    }
    int copy = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    ddl__passing *p = fd >= 0 && copy < 0 ? NULL : ddl__passing_new(c, peer, true);
    if (p == NULL) {
        if (copy >= 0) {
            close(copy);
        }
        return copy < 0 && fd >= 0 ? DDL_ERR_SYSTEM : DDL_ERR_NOMEM;
    }
    p->passed = copy;
    p->tag = tag;
    return DDL_OK;
}

/* Takes one that has come off the list. */
static bool ddl__passed_take(ddl_context *c, int32_t peer, uint64_t tag, int *out_fd) {
    for (ddl__passed **at = &c->passed; *at != NULL; at = &(*at)->next) {
        ddl__passed *p = *at;
        if (p->peer == peer && p->tag == tag) {
            *out_fd = p->fd;
            *at = p->next;
            ddl__free(&c->base, p);
            return true;
        }
    }
    return false;
}

/* Whoever asks waits for it: the listener is looked at too. */
static ddl_status ddl__host_take_fd(const ddl_host *host, int32_t peer, uint64_t tag, int *out_fd) {
    ddl_context *c = ddl__core(host);
    bool here = ddl__passed_take(c, peer, tag, out_fd);
    if (!here) {
        ddl__pass_progress(c);
        here = ddl__passed_take(c, peer, tag, out_fd);
    }
    return here ? DDL_OK : ddl__can_pass(c, peer) ? DDL_IN_PROGRESS : DDL_ERR_UNSUPPORTED;
}

static void ddl__pass_close(ddl_context *c) {
    while (c->passings != NULL) {
        ddl__passing_free(c, c->passings);
    }
    while (c->passed != NULL) {
        ddl__passed *p = c->passed;
        c->passed = p->next;
        if (p->fd >= 0) {
            close(p->fd);
        }
        ddl__free(&c->base, p);
    }
    if (c->pass_fd >= 0) {
        close(c->pass_fd);
        c->pass_fd = -1;
    }
}

/* >>mesh/board */
/* mesh: the board, memory that the ranks of a host share. For each rank it has a byte, its goodbye, and then a word
 * that says on which core it waits (cores.h). A rank that leaves in order sets its byte before its process can end,
 * so that whoever sees the process gone knows at once which it was: a goodbye message may still be in a socket, and
 * most ranks of a host are not connected to each other.
 *
 * Every rank makes a sealed memfd before the rendezvous; afterwards all of a host use that of its lowest rank, opened
 * through /proc or passed (spaces.h), and close their own. Nothing is left behind. Without both there is no board. */

/* The words begin in a cache line of their own. */
static size_t ddl__board_places(int32_t world_size) { return ((size_t)world_size + 63) / 64 * 64; }

static size_t ddl__board_bytes(int32_t world_size) {
    return ddl__board_places(world_size) + (size_t)world_size * sizeof(uint64_t);
}

/* This rank's own board as a descriptor, -1 when there can be none. */
static int32_t ddl__board_make(int32_t world_size) {
    int fd = memfd_create("ddl-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (posix_fallocate(fd, 0, (off_t)ddl__board_bytes(world_size)) != 0 ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* The board that process pid has as descriptor fd; -1: it cannot be reached. */
static int ddl__board_reach(int32_t pid, int32_t fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Maps a board, and closes the descriptor. Size and seals are checked first: a board that could shrink would turn a
 * look at it into SIGBUS. */
static void ddl__board_open(ddl_context *c, int fd) {
    struct stat st;
    size_t bytes = ddl__board_bytes(c->world_size);
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size == (off_t)bytes &&
        (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0) {
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        c->board = at != MAP_FAILED ? at : NULL;
        c->places = at != MAP_FAILED ? (void *)((char *)at + ddl__board_places(c->world_size)) : NULL;
    }
    if (fd >= 0) {
        close(fd);
    }
    if (c->board == NULL) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "no goodbye board: it cannot be shared; deaths of ranks that this one is not "
                 "connected to are noticed a few seconds late");
    }
}

static void ddl__board_close(ddl_context *c) {
    if (c->board != NULL) {
        munmap(c->board, ddl__board_bytes(c->world_size));
        c->board = NULL;
        c->places = NULL;
        c->spread = false;
    }
    if (c->board_fd >= 0) {
        close(c->board_fd);
        c->board_fd = -1;
    }
}

/* Release: everything this rank did stands before its goodbye. */
static void ddl__board_leave(ddl_context *c) {
    if (c->board != NULL) {
        atomic_store_explicit(&c->board[c->rank], 1, memory_order_release);
    }
}

static bool ddl__board_left(const ddl_context *c, int32_t rank) {
    return c->board != NULL && atomic_load_explicit(&c->board[rank], memory_order_acquire) == 1; /* pairs with leave */
}

/* >>mesh/cores */
/* mesh: which core each rank of this host waits on, and moving apart those that share one. Two ranks that answer each
 * other at once, each yielding to the other, stay on one core for seconds: the kernel sees a core where all get their
 * turn. Ranks say on the shared board where they wait; who finds too many on its core moves itself, and only itself. It
 * must not know what is waited for. */

enum {
    DDL__PLACE_PINNED = 1 << 16, /* of a place: the program allows that thread one core alone */
    DDL__PLACE_CORE = (1 << 16) - 1,
    DDL__PLACE_STAMP_SHIFT = 17,
    DDL__PLACE_FRESH = 50,       /* milliseconds (of 2^20 ns) that a place is believed */
    DDL__CROWD_LOOKS = 2         /* in a row must find it too full: wake-ups share a core for a moment */
};

#define DDL__PLACE_LOOK_NS DDL__NS_PER_MS
/* From one move of a rank to its next; twice as long each time, up to the second, when the kernel undoes it: on a busy
 * machine it has its reasons. */
#define DDL__MOVE_NS (10 * DDL__NS_PER_MS)
#define DDL__MOVE_NS_MAX (640 * DDL__NS_PER_MS)

/* A place in one word, so that it is read whole: core + 1, whether pinned, and when. 0: nowhere. */
static inline uint64_t ddl__place_make(int32_t core, bool pinned, uint64_t now_ns) {
    return (now_ns >> 20) << DDL__PLACE_STAMP_SHIFT | (pinned ? (uint64_t)DDL__PLACE_PINNED : 0) |
           (uint64_t)(core + 1);
}

/* The core of a place, if it is one of `allowed` and said of late; else -1. */
static int32_t ddl__place_core(uint64_t place, uint64_t now_ns, const cpu_set_t *allowed) {
    int32_t core = (int32_t)(place & DDL__PLACE_CORE) - 1;
    int64_t age = (int64_t)((now_ns >> 20) - (place >> DDL__PLACE_STAMP_SHIFT));
    bool fresh = age <= DDL__PLACE_FRESH && age >= -DDL__PLACE_FRESH;
    return fresh && core >= 0 && core < CPU_SETSIZE && CPU_ISSET((size_t)core, allowed) ? core : -1;
}

/* Where rank `me` should go: a core of `allowed`, or -1: it stays. A core is too full when another has at least two
 * fewer; the highest rank on it that is not pinned goes, to the core with the fewest; of several the nearest by number.
 * Ranks that wait elsewhere, or have not said so of late, do not count. */
static int32_t ddl__cores_choose(const _Atomic uint64_t *places, int32_t count, int32_t me, uint64_t now_ns,
                                 const cpu_set_t *allowed) {
    uint16_t load[CPU_SETSIZE] = {0};
    int32_t here = ddl__place_core(atomic_load_explicit(&places[me], memory_order_relaxed), now_ns, allowed);
    int32_t best = here;
    if (here < 0) {
        return -1;
    }
    for (int32_t i = 0; i < count; i++) { /* relaxed: a hint, and each word is whole */
        uint64_t place = atomic_load_explicit(&places[i], memory_order_relaxed);
        int32_t core = ddl__place_core(place, now_ns, allowed);
        if (core == here && i > me && (place & DDL__PLACE_PINNED) == 0) {
            return -1; /* that one's turn */
        }
        if (core >= 0 && load[core] < UINT16_MAX) {
            load[core]++;
        }
    }
    for (int32_t core = 0; core < CPU_SETSIZE && load[here] > 1; core++) {
        bool nearer = abs(core - here) < abs(best - here);
        if (CPU_ISSET((size_t)core, allowed) && (load[core] < load[best] || (load[core] == load[best] && nearer))) {
            best = core;
        }
    }
    return load[best] + 1 < load[here] ? best : -1;
}

/* Moves the calling thread, and leaves it as free as it was: from there the kernel may take it anywhere. */
static bool ddl__cores_move(int32_t core, const cpu_set_t *allowed) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)core, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) {
        return false;
    }
    if (sched_setaffinity(0, sizeof *allowed, allowed) != 0) { /* all of them were taken from us in between */
        memset(&one, 0xff, sizeof one);
        sched_setaffinity(0, sizeof one, &one);
    }
    return true;
}

static void ddl__place_say(ddl_context *c, int32_t core, bool pinned, uint64_t now) {
    c->place_core = core;
    c->place_pinned = pinned;
    atomic_store_explicit(&c->places[c->rank], ddl__place_make(core, pinned, now), memory_order_relaxed);
}

/* Says where this rank waits, and moves it when that core is too full: see ddl__place_wait. */
static void ddl__place_look(ddl_context *c, int32_t core, uint64_t now) {
    cpu_set_t allowed;
    c->place_ns = now;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        c->spread = false; /* more cores than the mask has room for, or a sandbox */
        return;
    }
    bool pinned = CPU_COUNT(&allowed) < 2;
    ddl__place_say(c, core, pinned, now);
    int32_t to = pinned ? -1 : ddl__cores_choose(c->places, c->world_size, c->rank, now, &allowed);
    c->crowd_looks = to >= 0 ? c->crowd_looks + 1 : 0;
    if (c->crowd_looks < DDL__CROWD_LOOKS || now - c->moved_ns < c->move_pause_ns) {
        return;
    }
    bool again = now - c->moved_ns < 2 * DDL__MOVE_NS_MAX;
    c->move_pause_ns = again ? DDL__MIN(2 * c->move_pause_ns, DDL__MOVE_NS_MAX) : DDL__MOVE_NS;
    c->moved_ns = now;
    c->crowd_looks = 0;
    if (ddl__cores_move(to, &allowed)) {
        ddl__place_say(c, to, false, now);
        ddl__log(&c->base, DDL_LOG_DEBUG, "moved from core %d, which other ranks wait on too, to core %d", core, to);
    }
}

/* At each wait that yields. Cheap: a number of the kernel's that is read without a call, and once a millisecond a look
 * at the others. */
static inline void ddl__place_wait(ddl_context *c, uint64_t now) {
    int32_t core = c->spread ? sched_getcpu() : -1;
    if (core < 0 || core >= DDL__PLACE_CORE) {
        return;
    }
    if (now - c->place_ns >= (uint64_t)DDL__PLACE_LOOK_NS) {
        ddl__place_look(c, core, now);
    } else if (core != c->place_core) {
        ddl__place_say(c, core, c->place_pinned, now);
    }
}

/* It sleeps: whichever core it had is free. */
static inline void ddl__place_sleep(ddl_context *c) {
    if (c->spread && c->place_core >= 0) {
        c->place_core = -1;
        atomic_store_explicit(&c->places[c->rank], 0, memory_order_relaxed);
    }
}

/* Once the board is there. */
static void ddl__places_open(ddl_context *c) {
    c->place_core = -1;
    c->spread = c->settings.spread && c->places != NULL && c->local_ranks > 1;
}

/* >>mesh/detector */
/* mesh, third part: who is dead. On one host a pidfd is the proof, between hosts a broken connection. Plugins are not
 * the detector.
 *
 * A rank whose process or link is gone is MISSED first. When its process is known to be gone, all that it sent is read
 * before the verdict: with a goodbye, in its link or on the board (board.h), it has LEFT, without one it is DEAD.
 * The first cause is flooded before anything else fails, and wins over the ripples that follow. */

#define DDL__GRACE_NS (1 * DDL__NS_PER_S) /* from the end of a link to the end of its process, on a busy machine */
#define DDL__GOODBYE_NS (250 * DDL__NS_PER_MS) /* from a goodbye to the error of those who still waited for that rank */
#define DDL__LOOK_NS (10 * DDL__NS_PER_MS)
#define DDL__LAST_WORDS_MS 500u /* from the end of a connection that watches to the last words on another transport */
#define DDL__PATIENCE_MS 300u /* for the other ranks of a host to say how one of them ended */

/* Group room: fails what needs the rank. */
static void ddl__groups_rank_dead(ddl_context *c, int32_t rank, const char *text);

/* >>process */

/* The start time of a process in ticks since boot, field 22 of its stat; 0 when there is no such process. */
static uint64_t ddl__process_start(int32_t pid) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    ddl__process process;
    if (ddl__read_text(path, text, sizeof text) <= 0 || !ddl__process_parse(text, &process)) {
        return 0;
    }
    return process.state == 'Z' || process.state == 'X' ? 0 : process.start;
}

/* Where pidfds exist one is kept per rank of this host; -1 falls back to /proc. */
static int32_t ddl__process_open(int32_t pid, uint64_t start) {
#ifdef SYS_pidfd_open
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd >= 0 && ddl__process_start(pid) != start) {
        close(fd); /* another process has the number already: /proc will say that ours is gone */
        return -1;
    }
    return fd;
#else
    (void)pid;
    (void)start;
    return -1;
#endif
}

static bool ddl__process_gone(const ddl__link *l) {
    if (l->pidfd >= 0) {
        struct pollfd p = {.fd = l->pidfd, .events = POLLIN};
        return poll(&p, 1, 0) == 1;
    }
    return ddl__process_start(l->pid) != l->pid_start;
}

static bool ddl__has_process(const ddl_context *c, const ddl__link *l) {
    return l->same_space ? l->pid > 0 && l->pid != c->pid : l->pidfd >= 0;
}

/* >>death */

static void ddl__flood(ddl_context *c, ddl__frame f, int32_t rank, const char *text, int32_t but) {
    uint8_t payload[300];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)rank);
    ddl__put_string(&w, text);
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (i != rank && i != but && l->connected && l->life == DDL__ALIVE) {
            ddl__tell(c, i, f, payload, w.at);
        }
    }
}

static void ddl__settle(ddl_context *c, ddl__link *l, ddl__life life) {
    c->missed_count -= l->life == DDL__MISSED;
    l->life = life;
    l->missed_ns = ddl__now_ns();
    if (l->pidfd >= 0) {
        close(l->pidfd); /* leaves the epoll set with it */
        l->pidfd = -1;
    }
}

/* Declares a rank dead: text is the cause that everybody will report. flags: DDL__DEAD_LINK or 0. but: who told us, -1
 * for nobody. */
static void ddl__dead(ddl_context *c, int32_t rank, const char *text, uint16_t flags, int32_t but) {
    ddl__link *l = &c->links[rank];
    if (l->life == DDL__DEAD || rank == c->rank || c->finalized) {
        return;
    }
    ddl__settle(c, l, DDL__DEAD);
    ddl__log(&c->base, DDL_LOG_WARN, "%s", text);
    ddl__flood(c, (ddl__frame){.type = DDL__FRAME_DEAD, .flags = flags}, rank, text, but);
    l->closing = true; /* from inside the transport's own calls it cannot be closed: see ddl__reap */
    c->closing_count++;
    ddl__groups_rank_dead(c, rank, text);
}

/* Its process or its link is gone; what that means is decided by ddl__look. After a goodbye it is as it should be. */
static void ddl__missed(ddl_context *c, int32_t peer, const char *how) {
    ddl__link *l = &c->links[peer];
    if (l->life == DDL__LEFT && how != NULL && !l->drained) {
        l->drained = true;
        l->closing = true; /* what still waits to be sent to it ends */
        c->closing_count++;
    }
    if (l->life == DDL__ALIVE && peer != c->rank) {
        l->life = DDL__MISSED;
        l->missed_ns = ddl__now_ns();
        l->missed_how = how;
        c->missed_count++;
        c->next_look_ns = 0;
    } else if (l->life == DDL__MISSED && l->missed_how == NULL) {
        l->missed_how = how;
    }
}

static void ddl__dead_rank(ddl_context *c, int32_t rank, const char *how, uint16_t flags) {
    ddl__link *l = &c->links[rank];
    char text[256];
    snprintf(text, sizeof text, "rank %d (pid %d on host %s) is dead: %s", rank, l->pid, l->host_name, how);
    ddl__dead(c, rank, text, flags, -1);
}

/* A cut is between hosts, not ranks. Several here see it at once, each on a link of its own: they must tell the same,
 * so all ranks of that host are named. */
static void ddl__dead_host(ddl_context *c, int32_t host, const char *how) {
    uint8_t *state = ddl__alloc_array(&c->base, (size_t)c->world_size, 1);
    char text[256];
    ddl__text out = {text, sizeof text, 0};
    const char *name = "?";
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        bool lost = l->host == host && (l->life == DDL__ALIVE || l->life == DDL__MISSED);
        name = lost ? l->host_name : name;
        if (state != NULL) {
            state[i] = lost ? 0 : 1;
        }
    }
    ddl__text_add(&out, "host %s with ", name);
    if (state != NULL) {
        ddl__text_ranks_below(&out, state, c->world_size, 1);
    }
    ddl__free(&c->base, state);
    ddl__text_add(&out, " is cut off: %s", how);
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].host == host) {
            ddl__missed(c, i, how); /* all of them first: the cut may be one way, and none is to be told of another */
        }
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].host == host && c->links[i].life == DDL__MISSED) {
            ddl__dead(c, i, text, DDL__DEAD_LINK, -1);
        }
    }
}

/* How long to wait for a word of those who know better: the other ranks of its host see whether its process ended. They
 * may be computing. Ranks of this host do not cry all at once, so that one cause goes round. */
static uint64_t ddl__patience(const ddl_context *c, const ddl__link *l) {
    uint64_t mates = 0, before_me = 0, least = l->watch != NULL ? DDL__LAST_WORDS_MS * DDL__NS_PER_MS : 0;
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__link *o = &c->links[i];
        mates += o != l && o->host == l->host && o->life <= DDL__MISSED;
        before_me += i < c->rank && o->same_host && o->life == DDL__ALIVE;
    }
    return mates == 0 ? least : (DDL__PATIENCE_MS + DDL__MIN(before_me * 20, 200u)) * DDL__NS_PER_MS + least;
}

/* The verdict on a process of this host that is gone. All that it sent is in our sockets: that is read first. */
static void ddl__judge_gone(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    while (l->endpoint->table->progress(l->endpoint->self, rank) > 0) {
    }
    if (l->life != DDL__MISSED) {
        return; /* its goodbye was there */
    }
    if (ddl__board_left(c, rank)) {
        ddl__settle(c, l, DDL__LEFT);
        l->drained = true;
    } else if (c->board != NULL || l->connected) {
        ddl__dead_rank(c, rank, ddl__how_ended, 0);
    } /* else it may have left in order: those who are connected to it know and tell */
}

/* It is cut off for what it sent, and not because it cannot be heard from here. */
static bool ddl__did_wrong(const ddl__link *l) {
    return l->missed_how == ddl__how_damaged || l->missed_how == ddl__how_unexpected;
}

static void ddl__judge(ddl_context *c, int32_t rank, uint64_t now) {
    ddl__link *l = &c->links[rank];
    uint64_t missed = now - DDL__MIN(l->missed_ns, now);
    bool told = l->missed_how != NULL && l->missed_how != ddl__how_ended; /* the link itself is what is wrong */
    if (ddl__has_process(c, l) && ddl__process_gone(l)) {
        ddl__judge_gone(c, rank);
    } else if (!l->same_host && l->missed_how == ddl__how_cut) {
        ddl__dead_host(c, l->host, ddl__how_cut);
    } else if (told) {
        ddl__dead_rank(c, rank, l->missed_how, (uint16_t)(ddl__did_wrong(l) ? 0 : DDL__DEAD_LINK));
    } else if (ddl__has_process(c, l) && missed > DDL__GRACE_NS) {
        ddl__dead_rank(c, rank, "its process lives but closed its link", 0);
    } else if (!ddl__has_process(c, l) && missed >= ddl__patience(c, l)) {
        ddl__dead_rank(c, rank,
                       "its connection ended without a goodbye: its process died, or something between the hosts "
                       "cut the connection",
                       DDL__DEAD_LINK);
    }
}

/* Looks at processes and at those who are missed, every 10 ms while there is a wait. */
static void ddl__look(ddl_context *c, uint64_t now) {
    if (now < c->next_look_ns) {
        return;
    }
    c->next_look_ns = now + DDL__LOOK_NS;
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (l->life == DDL__ALIVE && ddl__has_process(c, l) && ddl__process_gone(l)) {
            ddl__missed(c, i, NULL);
        }
    }
    c->next_look_ns = now + DDL__LOOK_NS;
    for (int32_t i = 0; c->missed_count > 0 && i < c->world_size; i++) {
        if (c->links[i].life == DDL__MISSED) {
            ddl__judge(c, i, now);
        }
    }
}

/* Tells transports about the dead, outside of their own calls. */
static void ddl__reap(ddl_context *c) {
    for (int32_t i = 0; c->closing_count > 0 && i < c->world_size; i++) {
        ddl__link *l = &c->links[i];
        if (l->closing) {
            l->closing = false;
            c->closing_count--;
            if (l->endpoint != NULL) {
                l->endpoint->table->peer_dead(l->endpoint->self, i);
            }
            if (l->watch != NULL) {
                l->watch->table->peer_dead(l->watch->self, i);
            }
        }
    }
}

/* >>frames */

static ddl_status ddl__on_dead(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[256];
    uint32_t rank = ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad || rank >= (uint32_t)c->world_size) {
        return DDL_ERR_CORRUPT;
    }
    const ddl__link *l = &c->links[rank];
    if ((f->flags & DDL__DEAD_LINK) != 0 && l->host == c->links[c->rank].host && l->host != c->links[peer].host &&
        ddl__has_process(c, l)) {
        c->next_look_ns = 0; /* who sits elsewhere has only lost the cable; here one sees whether it lives */
        return DDL_OK;
    }
    ddl__dead(c, (int32_t)rank, text, f->flags & DDL__DEAD_LINK, peer);
    return DDL_OK;
}

/* The peer leaves in order. */
static ddl_status ddl__on_bye(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    (void)payload;
    ddl__link *l = &c->links[peer];
    if (f->bytes != 0) {
        return DDL_ERR_CORRUPT;
    }
    if (l->life == DDL__ALIVE || l->life == DDL__MISSED) {
        ddl__settle(c, l, DDL__LEFT); /* drained when its link ends */
        l->drained = false;
    }
    return DDL_OK;
}

static void ddl__say_goodbye(ddl_context *c) {
    for (int32_t i = 0; i < c->world_size; i++) {
        if (c->links[i].connected && (c->links[i].life == DDL__ALIVE || c->links[i].life == DDL__MISSED)) {
            ddl__tell(c, i, (ddl__frame){.type = DDL__FRAME_BYE}, NULL, 0);
        }
    }
}

/* >>mesh/selftest */
/* mesh: the self-test of a plugin's transport. Before a plugin carries the job's data, two endpoints of it are opened
 * in this process and play a job of two ranks: messages of odd sizes go both ways, and one native all_reduce when there
 * is such. What arrives late, twice, in the wrong order, damaged or never is the plugin's failure; what cannot be set
 * up is not: the plugin may be short of memory or descriptors, and opening it in earnest will tell. It must not know
 * the job: the two have a job number of their own. */

enum { DDL__SELFTEST_ROUNDS = 2, DDL__SELFTEST_SIZES = 7, DDL__SELFTEST_MESSAGES = 14, DDL__SELFTEST_NATIVE = 1023 };
#define DDL__SELFTEST_NS (5 * DDL__NS_PER_S) /* only a transport that loses something takes so long */

/* Nothing; odd; beyond the pieces and rings that transports cut at. */
static const uint32_t ddl__selftest_sizes[DDL__SELFTEST_SIZES] = {0, 1, 3, 255, 4097, 16385, 131071};

/* One of the two ranks: as much of a context as host functions look at. */
typedef struct ddl__selftest_side {
    ddl_context c; /* first: handlers and the host table find their way back */
    ddl__link links[2];
    ddl__outgoing out[DDL__SELFTEST_MESSAGES];
    int32_t posted, sent, come;
    uint8_t *room;       /* where a payload may land directly */
    const uint8_t *data; /* message i is data + i % DDL__SELFTEST_SIZES, unaligned most of the time */
    uint8_t *memory;
    void *set, *op;
    uint32_t in[DDL__SELFTEST_NATIVE], result[DDL__SELFTEST_NATIVE];
    bool *short_of; /* memory or the like, either side */
    ddl__text *why;
} ddl__selftest_side;

static uint32_t ddl__selftest_bytes(int32_t i) { return ddl__selftest_sizes[i % DDL__SELFTEST_SIZES]; }

/* The first failure is the reason. */
static ddl_status __attribute__((format(printf, 2, 3))) ddl__selftest_fail(ddl__selftest_side *side, const char *format,
                                                                           ...) {
    char line[DDL__PLUGIN_REASON_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (side->why->used == 0) {
        ddl__text_add(side->why, "%s", line);
    }
    return DDL_ERR_CORRUPT;
}

/* >>selftest_host */

static void *ddl__selftest_alloc(const ddl_host *host, size_t bytes) {
    ddl__selftest_side *side = (ddl__selftest_side *)ddl__core(host);
    void *memory = ddl__alloc(&side->c.base, bytes);
    *side->short_of = *side->short_of || memory == NULL;
    return memory;
}

static void ddl__selftest_log(const ddl_host *host, ddl_log_level level, const char *line) {
    (void)host;
    (void)level;
    (void)line; /* opening it in earnest says the same */
}

static void ddl__selftest_lost(const ddl_host *host, int32_t peer, int32_t system_error, const char *what) {
    ddl__selftest_side *side = (ddl__selftest_side *)ddl__core(host);
    *side->short_of = *side->short_of || system_error == ENOMEM || system_error == EMFILE || system_error == ENFILE ||
                      system_error == ENOBUFS || system_error == ENOSPC;
    ddl__selftest_fail(side, "it lost the link from rank %d to rank %d (%s%s%s)", side->c.rank, peer, what,
                       system_error != 0 ? ": " : "", system_error != 0 ? strerror(system_error) : "");
}

/* A message is here: is it the next one, and whole? */
static ddl_status ddl__selftest_check(ddl__selftest_side *side, const ddl__frame *f, const void *payload) {
    int32_t i = side->come++;
    uint32_t bytes = ddl__selftest_bytes(i);
    if (i >= DDL__SELFTEST_MESSAGES || f->sequence != (uint64_t)i) {
        return ddl__selftest_fail(side, "message %llu of %d came as number %d", (unsigned long long)f->sequence,
                                  DDL__SELFTEST_MESSAGES, i);
    }
    if (f->bytes != bytes || f->signature != ddl__crc32c(0, side->data + i % DDL__SELFTEST_SIZES, bytes) ||
        (bytes > 0 && ddl__crc32c(0, payload, bytes) != f->signature)) {
        return ddl__selftest_fail(side, "message %d, of %u bytes, arrived damaged", i, bytes);
    }
    return DDL_OK;
}

static ddl_status ddl__selftest_deliver(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    (void)peer;
    return ddl__selftest_check((ddl__selftest_side *)c, f, payload);
}

/* Every other payload that may land anywhere lands in its place. */
static void *ddl__selftest_place(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl__selftest_side *side = (ddl__selftest_side *)c;
    (void)peer;
    (void)landing;
    return f->sequence % 2 == 1 && f->bytes <= ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] ? side->room : NULL;
}

static void ddl__selftest_placed(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)peer;
    if (status == DDL_OK) {
        ddl__selftest_check((ddl__selftest_side *)c, &landing->frame, landing->target);
    }
}

static void ddl__selftest_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl__selftest_side *side = (ddl__selftest_side *)c;
    side->sent++;
    if (status < 0) {
        ddl__selftest_fail(side, "message %lld was not sent: %s", (long long)out->index, ddl_status_text(status));
    }
}

/* >>selftest_stage */

/* Makes a side and opens its endpoint. Not DDL_OK: nothing can be said of the plugin. */
static ddl_status ddl__selftest_open(const ddl_context *real, ddl__selftest_side *side, int32_t rank, uint64_t job,
                                     const ddl_transport *table, const ddl_transport_params *as) {
    ddl_context *c = &side->c;
    ddl__endpoint *e = &c->endpoints[0];
    ddl_transport_params params = *as;
    size_t bytes = sizeof e->address / 2;
    c->base.log_level = DDL_LOG_NONE;
    c->settings.secret = real->settings.secret;
    c->settings.secret_bytes = real->settings.secret_bytes;
    c->rank = rank;
    c->world_size = c->local_ranks = 2;
    c->cores = real->cores;
    c->job = job;
    c->links = side->links;
    c->handlers[DDL__FRAME_P2P] =
        (ddl__handler){ddl__selftest_deliver, ddl__selftest_place, ddl__selftest_placed};
    side->memory = ddl__alloc(&c->base, ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1]);
    side->room = side->memory;
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (side->memory == NULL || c->epoll_fd < 0) {
        return DDL_ERR_NOMEM;
    }
    ddl__pass_open(c);
    e->host = ddl__host_table(c);
    e->host.alloc = ddl__selftest_alloc;
    e->host.log = ddl__selftest_log;
    e->host.lost = ddl__selftest_lost;
    params.rank = rank;
    params.world_size = params.local_ranks = 2;
    params.port_range = NULL; /* those ports are the job's */
    DDL__TRY(table->open(&e->host, &params, &e->self));
    e->table = table;
    DDL__TRY(table->address(e->self, e->address, &bytes));
    e->address_bytes = (uint32_t)bytes;
    return DDL_OK;
}

/* Lets both sides know each other. */
static ddl_status ddl__selftest_meet(ddl__selftest_side sides[2], const char *host_id) {
    for (int32_t i = 0; i < 2; i++) {
        ddl_context *c = &sides[i].c, *other = &sides[1 - i].c;
        ddl__link *l = &sides[i].links[1 - i];
        memcpy(l->pass_name, other->pass_name, sizeof l->pass_name);
        l->endpoint = &c->endpoints[0];
        for (int32_t k = 0; k < 2; k++) {
            sides[i].links[k].same_host = sides[i].links[k].same_space = true;
            sides[i].links[k].pidfd = -1;
        }
    }
    for (int32_t i = 0; i < 2; i++) {
        const ddl__endpoint *e = &sides[i].c.endpoints[0], *other = &sides[1 - i].c.endpoints[0];
        uint64_t latency_ns, bytes_per_s;
        ddl_status status = e->table->add_peer(e->self, 1 - i, other->address, other->address_bytes, host_id,
                                               &latency_ns, &bytes_per_s);
        if (status == DDL_ERR_UNSUPPORTED && (e->table->flags & DDL_TRANSPORT_LOCAL) == 0) { /* between hosts only? */
            status = e->table->add_peer(e->self, 1 - i, other->address, other->address_bytes, "another host",
                                        &latency_ns, &bytes_per_s);
        }
        DDL__TRY(status);
    }
    return DDL_OK;
}

/* Moves both sides on once; gives the core away when there was nothing to do. */
static void ddl__selftest_turn(ddl__selftest_side sides[2], uint32_t *idle) {
    int32_t events = 0;
    for (int32_t i = 0; i < 2; i++) {
        ddl__endpoint *e = &sides[i].c.endpoints[0];
        ddl__pass_progress(&sides[i].c);
        int32_t n = e->table->progress(e->self, 1 - i);
        if (n < 0) {
            ddl__selftest_fail(&sides[i], "its progress failed: %s", ddl_status_text((ddl_status)n));
        }
        events += n;
    }
    *idle = events > 0 ? 0 : *idle + 1;
    if (*idle > 1000) {
        poll(NULL, 0, 1);
    } else if (*idle > 20) {
        sched_yield();
    }
}

/* What is shared by both stands, or has been given up: that is no failure. */
static ddl_status ddl__selftest_ready(ddl__selftest_side sides[2], uint64_t deadline_ns) {
    uint32_t idle = 0;
    while (DDL_HAS(sides[0].c.endpoints[0].table, ready)) {
        ddl_status status[2];
        for (int32_t i = 0; i < 2; i++) {
            const ddl__endpoint *e = &sides[i].c.endpoints[0];
            status[i] = e->table->ready(e->self, 1 - i);
            DDL__TRY(status[i]);
        }
        if (status[0] == DDL_OK && status[1] == DDL_OK) {
            break;
        }
        if (ddl__now_ns() > deadline_ns) {
            return ddl__selftest_fail(&sides[0], "its two ends were not ready after %d s",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S));
        }
        ddl__selftest_turn(sides, &idle);
    }
    return DDL_OK;
}

/* >>selftest_data */

static ddl_status ddl__selftest_post(ddl__selftest_side *side) {
    while (side->posted < DDL__SELFTEST_MESSAGES) {
        int32_t i = side->posted;
        const uint8_t *payload = side->data + i % DDL__SELFTEST_SIZES;
        ddl__frame f = {.type = DDL__FRAME_P2P, .bytes = ddl__selftest_bytes(i), .sequence = (uint64_t)i};
        f.signature = ddl__crc32c(0, payload, f.bytes);
        side->out[i].done = ddl__selftest_done;
        side->out[i].index = i;
        ddl_status status = ddl__post(&side->c, 1 - side->c.rank, &side->out[i], &f, payload);
        if (status < 0) {
            *side->short_of = *side->short_of || status == DDL_ERR_NOMEM;
            return ddl__selftest_fail(side, "it refuses message %d, of %u bytes: %s", i, f.bytes,
                                      ddl_status_text(status));
        }
        side->posted++;
        side->sent += status == DDL_OK;
    }
    return DDL_OK;
}

static ddl_status ddl__selftest_messages(ddl__selftest_side sides[2], uint64_t deadline_ns) {
    uint32_t idle = 0;
    for (int32_t i = 0; i < 2; i++) {
        DDL__TRY(ddl__selftest_post(&sides[i]));
    }
    for (;;) {
        bool all = true;
        for (int32_t i = 0; i < 2; i++) {
            all = all && sides[i].come >= DDL__SELFTEST_MESSAGES && sides[i].sent == DDL__SELFTEST_MESSAGES;
        }
        if (sides[0].why->used > 0) {
            return DDL_ERR_CORRUPT;
        }
        if (all) {
            return DDL_OK;
        }
        if (ddl__now_ns() > deadline_ns) {
            return ddl__selftest_fail(&sides[0], "after %d s, %d and %d of %d messages had arrived",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S), sides[0].come, sides[1].come,
                                      DDL__SELFTEST_MESSAGES);
        }
        ddl__selftest_turn(sides, &idle);
    }
}

static void ddl__selftest_sum(void *arg, void *dst, const void *const *srcs, int32_t src_count, uint64_t bytes) {
    uint8_t *out = dst;
    (void)arg;
    for (uint64_t at = 0; at < bytes; at += sizeof(uint32_t)) {
        uint32_t sum = 0, one;
        for (int32_t i = 0; i < src_count; i++) {
            memcpy(&one, (const uint8_t *)srcs[i] + at, sizeof one);
            sum += one;
        }
        memcpy(out + at, &sum, sizeof sum);
    }
}

/* Begins the sum on one side. DDL_ERR_UNSUPPORTED: it is not served natively. */
static ddl_status ddl__selftest_begin(ddl__selftest_side *side) {
    static const int32_t ranks[2] = {0, 1};
    const ddl__endpoint *e = &side->c.endpoints[0];
    for (uint32_t i = 0; i < DDL__SELFTEST_NATIVE; i++) {
        side->in[i] = (i + 1) * (side->c.rank == 0 ? 3u : 0x01000193u);
        side->result[i] = 0xdeadbeef;
    }
    ddl_native_call call = {.size = sizeof call, .kind = DDL_ALL_REDUCE, .element_bytes = sizeof side->in[0],
                            .sequence = 1, .signature = 1, .in = side->in, .out = side->result,
                            .bytes = sizeof side->in, .reduce = ddl__selftest_sum};
    DDL__TRY(e->table->native_open(e->self, 1, ranks, 2, side->c.rank, &side->set));
    if (e->table->native_cost_ns(e->self, side->set, call.kind, call.bytes) == 0) {
        return DDL_ERR_UNSUPPORTED;
    }
    return e->table->native_start(e->self, side->set, &call, &side->op);
}

/* Ends what began on one side. */
static void ddl__selftest_end(ddl__selftest_side *side) {
    const ddl__endpoint *e = &side->c.endpoints[0];
    if (side->op != NULL) {
        e->table->native_cancel(e->self, side->set, side->op);
    }
    if (side->set != NULL) {
        e->table->native_close(e->self, side->set);
    }
    side->op = side->set = NULL;
}

static ddl_status ddl__selftest_native(ddl__selftest_side sides[2], uint64_t deadline_ns) {
    const ddl_transport *table = sides[0].c.endpoints[0].table;
    uint32_t idle = 0;
    if (!DDL_HAS(table, native_open) || ddl__selftest_begin(&sides[0]) < 0 || ddl__selftest_begin(&sides[1]) < 0) {
        return DDL_OK; /* such calls go by messages */
    }
    while (sides[0].op != NULL || sides[1].op != NULL) {
        for (int32_t i = 0; i < 2; i++) {
            int32_t waits_for = -1;
            ddl__selftest_side *side = &sides[i];
            ddl_status status = side->op == NULL ? DDL_IN_PROGRESS
                                : table->native_test(side->c.endpoints[0].self, side->set, side->op, 4, &waits_for);
            side->op = status == DDL_OK ? NULL : side->op;
            if (status < 0) {
                return ddl__selftest_fail(side, "its native all_reduce failed: %s", ddl_status_text(status));
            }
        }
        if (ddl__now_ns() > deadline_ns) {
            return ddl__selftest_fail(&sides[0], "its native all_reduce did not end within %d s",
                                      (int)(DDL__SELFTEST_NS / DDL__NS_PER_S));
        }
        ddl__selftest_turn(sides, &idle);
    }
    for (uint32_t i = 0; i < 2 * DDL__SELFTEST_NATIVE; i++) {
        uint32_t at = i / 2, expected = sides[0].in[at] + sides[1].in[at];
        if (sides[i % 2].result[at] != expected) {
            return ddl__selftest_fail(&sides[i % 2], "element %u of its native all_reduce is %u, expected %u", at,
                                      sides[i % 2].result[at], expected);
        }
    }
    return DDL_OK;
}

/* >>selftest */

static void ddl__selftest_close(ddl__selftest_side *side) {
    ddl_context *c = &side->c;
    ddl__endpoint *e = &c->endpoints[0];
    ddl__pass_close(c);
    if (e->table != NULL) {
        ddl__selftest_end(side);
        e->table->close(e->self);
    }
    while (c->notes != NULL) {
        ddl__note *n = c->notes;
        c->notes = n->next;
        ddl__free(&c->base, n);
    }
    while (c->landings != NULL) {
        ddl__landing *l = c->landings;
        c->landings = l->next;
        ddl__free(&c->base, l);
    }
    ddl__scratch_free_all(c);
    ddl__free(&c->base, side->memory);
    if (c->epoll_fd >= 0) {
        close(c->epoll_fd);
    }
}

/* The whole play. *out_short: the plugin was short of something, so that nothing was shown. */
static ddl_status ddl__selftest_play(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                                     ddl__selftest_side sides[2], uint8_t *data) {
    uint64_t job, deadline_ns = ddl__now_ns() + DDL__SELFTEST_NS;
    DDL__TRY(ddl__random(&job, sizeof job));
    for (uint32_t i = 0; i < ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] + DDL__SELFTEST_SIZES; i++) {
        data[i] = (uint8_t)((i * 2654435761u) >> 24);
    }
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < 2 && status == DDL_OK; i++) {
        sides[i].data = data;
        status = ddl__selftest_open(c, &sides[i], i, job, table, params);
    }
    status = status == DDL_OK ? ddl__selftest_meet(sides, params->host_id) : status;
    status = status == DDL_OK ? ddl__selftest_ready(sides, deadline_ns) : status;
    status = status == DDL_OK ? ddl__selftest_messages(sides, deadline_ns) : status;
    return status == DDL_OK ? ddl__selftest_native(sides, deadline_ns) : status;
}

/* One try. Returns true unless the transport has failed; then *why says how. */
static bool ddl__selftest_once(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                               ddl__text *why) {
    bool short_of = false;
    ddl__selftest_side *sides = ddl__alloc_array(&c->base, 2, sizeof *sides);
    uint8_t *data = ddl__alloc(&c->base, ddl__selftest_sizes[DDL__SELFTEST_SIZES - 1] + DDL__SELFTEST_SIZES);
    for (int32_t i = 0; sides != NULL && i < 2; i++) {
        sides[i].c.base = c->base;
        sides[i].c.epoll_fd = sides[i].c.pass_fd = sides[i].c.wake_fd = -1;
        sides[i].short_of = &short_of;
        sides[i].why = why;
    }
    if (sides != NULL && data != NULL) {
        uint64_t start_ns = ddl__now_ns();
        ddl_status status = ddl__selftest_play(c, table, params, sides, data);
        ddl__log(&c->base, DDL_LOG_DEBUG, "self-test: %s, %.2f ms",
                 why->used > 0 ? "failed" : status < 0 ? ddl_status_text(status) : "passed",
                 (double)(ddl__now_ns() - start_ns) * 1e-6);
    }
    for (int32_t i = 0; sides != NULL && i < 2; i++) {
        ddl__selftest_close(&sides[i]);
    }
    ddl__free(&c->base, data);
    ddl__free(&c->base, sides);
    return why->used == 0 || short_of;
}

/* Tries a transport out. What fails once may have met a full system or a signal; twice is no chance. A transport that
 * is used on request only (tests, simulations) may have a world or a clock of its own, and is believed.
 * Returns false when it is not to be used; *why says how it failed. */
static bool ddl__selftest(ddl_context *c, const ddl_transport *table, const ddl_transport_params *params,
                          ddl__text *why) {
    if (!c->settings.self_test || (table->flags & DDL_TRANSPORT_ON_REQUEST) != 0 || DDL_HAS(table, clock_ns)) {
        return true;
    }
    uint64_t start_ns = ddl__now_ns();
    if (ddl__selftest_once(c, table, params, why)) {
        return true;
    }
    if (ddl__now_ns() - start_ns >= DDL__SELFTEST_NS) {
        return false; /* no moment's trouble lasts so long */
    }
    why->used = 0;
    return ddl__selftest_once(c, table, params, why);
}

/* >>mesh/spaces */
/* mesh: ranks of one host that number processes each on its own, as containers do that share a network and no more.
 * What others look up in /proc they pass to each other as descriptors when they join: their process, for the detector,
 * and the goodbye board. It must not know what is done with them. */

enum { DDL__TAG_PROCESS = 0x64646c01, DDL__TAG_BOARD }; /* of passed descriptors */

/* The space in which this process has its number; 0 where /proc does not say. */
static uint64_t ddl__process_space(void) {
    struct stat space;
    return stat("/proc/self/ns/pid", &space) == 0 ? (uint64_t)space.st_ino : 0;
}

static int ddl__process_own(void) {
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, getpid(), 0);
#else
    return -1;
#endif
}

static bool ddl__can_pass_process(void) {
    int fd = ddl__process_own();
    if (fd >= 0) {
        close(fd);
    }
    return fd >= 0;
}

/* Its end is noticed at once, whatever this rank waits for. */
static void ddl__link_watch_fd(ddl_context *c, int32_t rank, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = (uint32_t)rank}};
    c->links[rank].pidfd = fd;
    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void ddl__space_tell(ddl_context *c, int32_t rank, int32_t board_rank) {
    ddl__link *l = &c->links[rank];
    int own = l->process_told ? -1 : ddl__process_own();
    if (own >= 0) {
        l->process_told = ddl__host_send_fd(&c->endpoints[0].host, rank, DDL__TAG_PROCESS, own) == DDL_OK;
        close(own);
    }
    if (board_rank == c->rank && !l->board_told) {
        l->board_told = ddl__host_send_fd(&c->endpoints[0].host, rank, DDL__TAG_BOARD, c->board_fd) == DDL_OK;
    }
}

/* Tells the ranks of other spaces, and takes what they tell; *board becomes that of board_rank, when it comes. Returns
 * how many descriptors are still to come or to go. */
static int32_t ddl__spaces_settling(ddl_context *c, int32_t board_rank, int *board, int32_t *out_rank) {
    int32_t open = 0;
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        ddl__link *l = &c->links[rank];
        if (!l->passes_process) {
            continue;
        }
        ddl__space_tell(c, rank, board_rank);
        int fd = -1;
        if (l->pidfd < 0 && ddl__passed_take(c, rank, DDL__TAG_PROCESS, &fd) && fd >= 0) {
            ddl__link_watch_fd(c, rank, fd);
        }
        bool boards = rank == board_rank && !l->board_taken;
        l->board_taken = l->board_taken || (boards && ddl__passed_take(c, rank, DDL__TAG_BOARD, board));
        bool waits = l->pidfd < 0 || (rank == board_rank && !l->board_taken) || !l->process_told ||
                     (board_rank == c->rank && !l->board_told);
        open += waits;
        *out_rank = waits ? rank : *out_rank;
    }
    return open;
}

/* >>mesh/wait */
/* mesh, fourth part: progress and waiting. One thread of a context polls, the others sleep until something changed.
 * The poller spins while every rank can have a core, yields for a while, then sleeps in the kernel: more ranks than
 * cores must stay fast, and an idle rank must cost nothing. */

enum {
    DDL__POLLS_ALONE = 4000,   /* empty polls before sleeping when ranks <= cores: a few milliseconds */
    DDL__POLLS_CROWDED = 40,   /* the same when ranks share cores: each poll gives the core away first */
    DDL__POLLS_BUSY = 2,       /* the same while other programs want the cores */
    DDL__BUSY_WAITS = 500,     /* for so many waits */
    DDL__LONG_YIELD_NS = 400000,
    DDL__POLLS_AFTER_SLEEP = 8,
    DDL__POLLS_CHEAP = 64, /* looks at memory for each at the kernel */
    DDL__LOOKS_SHORTLY = 4096,
    DDL__SPINS_ALONE = 64, /* looks at memory before the core is given away */
    DDL__SPINS_CROWDED = 4,
    DDL__SLEEP_MS = 50         /* the longest sleep: timers are looked at this often */
};

/* Engine room: looks at operations that transports run by themselves. Returns how many moved. */
static int32_t ddl__natives_poll(ddl_context *c);

/* A transport says that it is of no use any more: so are the links that it carried. */
static void ddl__transport_failed(ddl_context *c, const ddl__endpoint *e) {
    for (int32_t r = 0; r < c->world_size; r++) {
        if (c->links[r].endpoint == e) {
            ddl__missed(c, r, "the transport to it has failed");
        }
    }
}

/* Lets one thing happen on the transports. expect: the rank that is waited for most, -1 for none. While something is
 * expected in memory, transports that have to ask the kernel are looked at only now and then. */
static int32_t ddl__poll(ddl_context *c, int32_t expect) {
    int32_t events = c->natives != NULL ? ddl__natives_poll(c) : 0;
    const ddl__endpoint *expected = expect >= 0 ? c->links[expect].endpoint : NULL;
    bool all = (expected == NULL && c->natives == NULL) || ++c->polls % DDL__POLLS_CHEAP == 0;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        ddl__endpoint *e = &c->endpoints[i];
        if (all || e == expected || (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) != 0) {
            int32_t n = e->table->progress(e->self, e == expected ? expect : -1);
            events += n > 0 ? n : 0;
            if (n < 0) {
                ddl__transport_failed(c, e);
            }
        }
    }
    if (c->closing_count > 0) {
        ddl__reap(c);
    }
    if (c->passings != NULL) {
        ddl__pass_progress(c);
    }
    return events;
}

static void ddl__wake(ddl_context *c) {
    if (c->cond_waiters > 0) {
        pthread_cond_broadcast(&c->changed);
    }
    uint64_t one = 1;
    if (c->wake_fd >= 0 && write(c->wake_fd, &one, sizeof one) < 0) {
        return; /* full: the sleeper will wake anyway */
    }
}

/* Something ended: threads that wait for it look again, the one that sleeps for all of them too. */
static void ddl__changed(ddl_context *c) {
    ddl__kick(c);
    if (c->cond_waiters > 0) {
        pthread_cond_broadcast(&c->changed);
    }
}

/* What another thread or a process that ended left in the context's own epoll set. */
static void ddl__drain_wakes(ddl_context *c) {
    struct epoll_event events[4];
    int n = epoll_wait(c->epoll_fd, events, (int)DDL__COUNT_OF(events), 0);
    for (int i = 0; i < n; i++) {
        uint64_t count;
        if (events[i].data.u32 == DDL__PASSING_EVENT) {
            ddl__pass_progress(c);
        } else if (events[i].data.u32 != UINT32_MAX) {
            c->next_look_ns = 0; /* a pidfd: the detector looks at once */
        } else if (read(c->wake_fd, &count, sizeof count) < 0) {
            continue; /* somebody else drained it */
        }
    }
}

/* Fills fds with what transports wake through, the context's own set first. Returns how many there are; 0: a transport
 * has something to do at once. */
static nfds_t ddl__arm(ddl_context *c, struct pollfd *fds) {
    nfds_t count = 0;
    fds[count++] = (struct pollfd){.fd = c->epoll_fd, .events = POLLIN};
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        ddl__endpoint *e = &c->endpoints[i];
        int fd = -1;
        if (DDL_HAS(e->table, arm)) {
            if (e->table->arm(e->self, &fd) != DDL_OK) {
                return 0;
            }
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
    }
    return count;
}

/* Sleeps until a transport, a process or another thread has something, at most DDL__SLEEP_MS. poll() and not one epoll
 * set over the transports' own: a nested set makes every packet pay for a wake-up that nobody waits for. A single
 * transport that cannot be polled for (a simulation) sleeps its own way. */
static void ddl__sleep(ddl_context *c, uint64_t now, uint64_t deadline) {
    struct pollfd fds[DDL__ENDPOINTS_MAX + 1];
    nfds_t count = ddl__arm(c, fds);
    uint64_t ms = deadline > now ? DDL__MIN((deadline - now) / DDL__NS_PER_MS + 1, (uint64_t)DDL__SLEEP_MS) : 0;
    if (count == 0) {
        return;
    }
    if (c->missed_count > 0) {
        ms = DDL__MIN(ms, 5u);
    }
    bool unarmed = count <= (nfds_t)c->endpoint_count; /* some transport wakes nobody by a descriptor */
    ddl__endpoint *only = c->endpoint_count == 1 ? &c->endpoints[0] : NULL;
    bool own_way = unarmed && only != NULL && DDL_HAS(only->table, wait);
    if (unarmed && !own_way) {
        ms = DDL__MIN(ms, 1u);
    }
    ddl__place_sleep(c);
    c->sleeping = true;
    ddl__unlock(c);
    if (own_way) {
        only->table->wait(only->self, (int64_t)(ms * DDL__NS_PER_MS), &c->epoll_fd, 1);
        fds[0].revents = POLLIN;
    } else if (poll(fds, count, (int)ms) < 0) {
        fds[0].revents = POLLIN;
    }
    ddl__lock(c);
    c->sleeping = false;
    if (fds[0].revents != 0) {
        ddl__drain_wakes(c);
    }
}

/* Gives whoever else wants the core its turn: a rank that spins through its time slice on a busy machine may be keeping
 * the very rank from running that it waits for. On an idle core a yield is about as long as the poll. */
static void ddl__yield(ddl_context *c, bool unlocked) {
    uint64_t before = ddl__about_ns(c);
    ddl__place_wait(c, before);
    if (unlocked) {
        ddl__unlock(c);
    }
    sched_yield();
    if (unlocked) {
        ddl__lock(c);
    }
    bool taken = ddl__about_ns(c) - before > DDL__LONG_YIELD_NS;
    /* Somebody who computes had the core, and not only once: the next yields would cost a time slice each. A sleeper is
     * woken at once. */
    c->long_yields = taken ? c->long_yields + 16 : DDL__MAX(c->long_yields - 1, 0);
    if (c->long_yields > 16) {
        c->long_yields = 0;
        c->busy_waits = DDL__BUSY_WAITS;
    }
}

/* The same, and other threads of this context too. */
static void ddl__give_way(ddl_context *c) {
    ddl__yield(c, atomic_load_explicit(&c->lock_waiters, memory_order_relaxed) > 0);
}

/* How many empty polls come before sleep. */
static int32_t ddl__poll_limit(const ddl_context *c) {
    if (c->busy_waits > 0) {
        return DDL__POLLS_BUSY;
    }
    return c->local_ranks > c->cores ? DDL__POLLS_CROWDED : DDL__POLLS_ALONE;
}

/* Not the poller: sleeps until something changed. */
static void ddl__wait_changed(ddl_context *c, uint64_t deadline) {
    uint64_t until = DDL__MIN(deadline, ddl__now_ns() + DDL__SLEEP_MS * DDL__NS_PER_MS);
    struct timespec at = {(time_t)(until / DDL__NS_PER_S), (long)(until % DDL__NS_PER_S)};
    c->cond_waiters++;
    pthread_cond_timedwait(&c->changed, &c->lock, &at);
    c->cond_waiters--;
}

/* What a wait is for. done is asked after each event. tick runs every 10 ms or so: deadlines, stall reports. */
typedef struct ddl__wait {
    bool (*done)(ddl_context *c, void *arg);
    void (*tick)(ddl_context *c, void *arg, uint64_t now);
    int32_t (*expect)(ddl_context *c, void *arg); /* may be NULL */
    void *arg;
    uint64_t deadline;
} ddl__wait;

/* How many looks at memory come before this core is given away. A look that asks the kernel is as dear as that. */
static int32_t ddl__spin_limit(const ddl_context *c, int32_t expect) {
    const ddl__endpoint *e = expect < 0 ? NULL : c->links[expect].endpoint;
    bool cheap = c->natives != NULL || (e != NULL && (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) != 0);
    bool wanted = atomic_load_explicit(&c->lock_waiters, memory_order_relaxed) > 0;
    if (!cheap || wanted || c->busy_waits > 0) {
        return 1;
    }
    return c->local_ranks > c->cores ? DDL__SPINS_CROWDED : DDL__SPINS_ALONE;
}

/* Looks where the expected rank writes into memory, and nowhere else, for about as long as its answer takes when it
 * comes at once, and while what it sends is coming. The lock is kept: nobody else polls meanwhile. */
static bool ddl__wait_shortly(ddl_context *c, const ddl__wait *w) {
    int32_t expect = w->expect(c, w->arg);
    const ddl__endpoint *e = expect < 0 ? NULL : c->links[expect].endpoint;
    if (e == NULL || (e->table->flags & DDL_TRANSPORT_CHEAP_PROGRESS) == 0 || c->polling || c->natives != NULL) {
        return false;
    }
    int32_t limit = ddl__spin_limit(c, expect);
    for (int32_t looks = 0, empty = 0; empty < limit && looks < DDL__LOOKS_SHORTLY; looks++) {
        int32_t events = e->table->progress(e->self, expect);
        if (events != 0 && w->done(c, w->arg)) {
            return true;
        }
        empty = events != 0 ? 0 : empty + 1;
    }
    return false;
}

/* Polls until it is done, its deadline has passed or the context is aborted. Returns done. */
static bool ddl__poll_until(ddl_context *c, const ddl__wait *w) {
    int32_t empty = 0, spins = 0;
    c->busy_waits -= c->busy_waits > 0;
    for (uint32_t round = 1;; round++) {
        int32_t limit = ddl__poll_limit(c);
        int32_t expect = w->expect != NULL ? w->expect(c, w->arg) : -1;
        int32_t events = ddl__poll(c, expect);
        if (w->done(c, w->arg)) {
            return true;
        }
        spins = events > 0 ? 0 : spins + 1;
        if (spins > 0 && spins % ddl__spin_limit(c, expect) != 0) {
            continue;
        }
        empty = events > 0 ? 0 : empty + 1;
        if (events > 0 && round % 256 != 0) {
            continue;
        }
        if (empty < limit && empty % 64 != 0) {
            ddl__give_way(c);
            continue;
        }
        uint64_t now = ddl__now_ns();
        ddl__look(c, now);
        w->tick(c, w->arg, now);
        if (w->done(c, w->arg)) {
            return true;
        }
        if (now >= w->deadline) {
            return false;
        }
        if (empty >= limit) {
            ddl__sleep(c, now, w->deadline);
            /* Nothing there: back to sleep soon, an idle rank costs nothing. */
            empty = DDL__MAX(limit - DDL__POLLS_AFTER_SLEEP, 0);
        } else {
            ddl__give_way(c);
        }
    }
}

/* Waits, as the poller or behind it. The lock is held before and after, not while sleeping. */
static bool ddl__wait_for(ddl_context *c, const ddl__wait *w) {
    while (!w->done(c, w->arg)) {
        if (!c->polling) {
            c->polling = true;
            bool done = ddl__poll_until(c, w);
            c->polling = false;
            ddl__changed(c); /* another takes over */
            return done;
        }
        ddl__wait_changed(c, w->deadline);
        uint64_t now = ddl__now_ns();
        w->tick(c, w->arg, now);
        if (!w->done(c, w->arg) && now >= w->deadline) {
            return false;
        }
    }
    return true;
}

static bool ddl__notes_gone(ddl_context *c, void *arg) {
    (void)arg;
    return c->notes_out == 0 || c->finalized;
}

static void ddl__no_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)c;
    (void)arg;
    (void)now;
}

/* Waits until control messages have left: what others depend on must not stay behind when the caller computes. Those to
 * ranks that do not take them stay behind. */
#define DDL__FLUSH_NS (100 * DDL__NS_PER_MS)
static void ddl__flush_notes(ddl_context *c) {
    ddl__wait w = {.done = ddl__notes_gone, .tick = ddl__no_tick, .deadline = ddl__now_ns() + DDL__FLUSH_NS};
    ddl__wait_for(c, &w);
}

/* The progress thread. Beside it, waits of user threads only sleep. */
static bool ddl__thread_done(ddl_context *c, void *arg) {
    (void)arg;
    return c->thread_stop;
}

static void ddl__thread_tick(ddl_context *c, void *arg, uint64_t now);

static void *ddl__thread_main(void *arg) {
    ddl_context *c = arg;
    ddl__wait w = {.done = ddl__thread_done, .tick = ddl__thread_tick, .deadline = DDL__NEVER};
    ddl__lock(c);
    while (!c->thread_stop) {
        ddl__wait_for(c, &w);
    }
    ddl__unlock(c);
    return NULL;
}

/* >>tensor */
/* tensor: views of memory. Making, checking, packing and lending them. It must not know of messages. */

/* >>views */

DDL_API ddl_tensor ddl_tensor_nd(const void *data, ddl_dtype dtype, int32_t ndim, const int64_t *shape) {
    ddl_tensor t = {0};
    if (ndim < 0 || ndim > DDL_MAX_DIMS || (ndim > 0 && shape == NULL)) {
        return t;
    }
    t.data = (void *)(uintptr_t)data;
    t.dtype = dtype;
    t.ndim = ndim;
    for (int32_t i = 0; i < ndim; i++) {
        t.shape[i] = shape[i];
    }
    return t;
}

DDL_API ddl_tensor ddl_tensor_1d(const void *data, ddl_dtype dtype, int64_t count) {
    return ddl_tensor_nd(data, dtype, 1, &count);
}

DDL_API int64_t ddl_tensor_count(const ddl_tensor *tensor) {
    if (tensor == NULL || tensor->ndim < 0 || tensor->ndim > DDL_MAX_DIMS) {
        return -1;
    }
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0 || __builtin_mul_overflow(count, tensor->shape[i], &count)) {
            return -1;
        }
    }
    return count;
}

static bool ddl__is_contiguous(const ddl_tensor *t) {
    bool zero = true, packed = true;
    uint64_t expected = 1; /* may wrap beside a dimension of 0 elements, where it does not matter */
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        zero = zero && t->strides[i] == 0;
        packed = packed && (t->shape[i] <= 1 || (uint64_t)t->strides[i] == expected);
        expected *= (uint64_t)t->shape[i];
    }
    return zero || packed || expected <= 1 || ddl_tensor_count(t) <= 1;
}

/* Lowest and one past the highest byte that a tensor touches. */
static void ddl__tensor_extent(const ddl_tensor *t, const char **out_low, const char **out_high) {
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), low = 0, high = size;
    int64_t count = ddl_tensor_count(t);
    if (count <= 0) {
        *out_low = *out_high = t->data;
        return;
    }
    if (ddl__is_contiguous(t)) {
        high = count * size;
    } else {
        for (int32_t i = 0; i < t->ndim; i++) {
            int64_t span = (t->shape[i] - 1) * t->strides[i] * size;
            low += span < 0 ? span : 0;
            high += span > 0 ? span : 0;
        }
    }
    *out_low = (const char *)t->data + low;
    *out_high = (const char *)t->data + high;
}

static bool ddl__tensors_overlap(const ddl_tensor *a, const ddl_tensor *b) {
    const char *al, *ah, *bl, *bh;
    ddl__tensor_extent(a, &al, &ah);
    ddl__tensor_extent(b, &bl, &bh);
    return al < ah && bl < bh && al < bh && bl < ah;
}

/* Goes to the next element in C order; offset is in elements. */
static int64_t ddl__tensor_next(const ddl_tensor *t, int64_t index[DDL_MAX_DIMS], int64_t offset) {
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        offset += t->strides[d];
        if (++index[d] < t->shape[d]) {
            break;
        }
        offset -= t->shape[d] * t->strides[d];
        index[d] = 0;
    }
    return offset;
}

/* Whether t has an element in a contiguous tensor. What lies between the elements of t does not count. */
static bool ddl__tensor_touches(const ddl_tensor *t, const ddl_tensor *contiguous) {
    const char *low, *high;
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), index[DDL_MAX_DIMS] = {0}, offset = 0;
    if (!ddl__tensors_overlap(t, contiguous) || ddl__is_contiguous(t)) {
        return ddl__tensors_overlap(t, contiguous);
    }
    ddl__tensor_extent(contiguous, &low, &high);
    for (int64_t left = ddl_tensor_count(t); left > 0; left--) {
        const char *at = (const char *)t->data + offset * size;
        if (at < high && low < at + size) {
            return true;
        }
        offset = ddl__tensor_next(t, index, offset);
    }
    return false;
}

/* Copies the first bytes of a strided tensor to packed memory or back. A stride that is negative or zero is as good as
 * any. */
static void ddl__pack_bytes(const ddl_tensor *t, char *packed, uint64_t bytes, bool unpack) {
    uint64_t size = ddl_dtype_bytes(t->dtype);
    int64_t index[DDL_MAX_DIMS] = {0}, at = 0;
    if (ddl__is_contiguous(t)) { /* strides that are all zero say so too */
        memcpy(unpack ? t->data : packed, unpack ? packed : t->data, (size_t)bytes);
        return;
    }
    for (; bytes > 0; bytes -= DDL__MIN(bytes, size)) {
        char *element = (char *)t->data + at * (int64_t)size;
        memcpy(unpack ? element : packed, unpack ? packed : element, (size_t)DDL__MIN(bytes, size));
        packed += size;
        at = ddl__tensor_next(t, index, at);
    }
}

static void ddl__pack(const ddl_tensor *t, char *packed, bool unpack) {
    ddl__pack_bytes(t, packed, (uint64_t)ddl_tensor_count(t) * ddl_dtype_bytes(t->dtype), unpack);
}

/* False when the strides lead so far away that offsets in bytes overflow. */
static bool ddl__strides_valid(const ddl_tensor *t) {
    int64_t size = (int64_t)ddl_dtype_bytes(t->dtype), low = 0, high = size;
    for (int32_t i = 0; i < t->ndim; i++) {
        int64_t span;
        if (t->shape[i] > 1 && (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &span) ||
                                __builtin_mul_overflow(span, size, &span) ||
                                __builtin_add_overflow(span < 0 ? low : high, span, span < 0 ? &low : &high))) {
            return false;
        }
    }
    return true;
}

/* Checks a tensor that a caller passed. what: the call, which: the argument, for the sentence. */
static ddl_status ddl__tensor_check(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    int64_t count = ddl_tensor_count(t);
    size_t size = ddl_dtype_bytes(t->dtype);
    if (size == 0) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the type of tensor `%s` is %d, which is no ddl_dtype", what, which,
                          (int)t->dtype);
    }
    if (count < 0 || (uint64_t)count > (uint64_t)INT64_MAX / size) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the shape of tensor `%s` is not valid (ndim %d; no dimension may be "
                          "negative, at most %d dimensions)", what, which, t->ndim, DDL_MAX_DIMS);
    }
    if (count > 0 && !ddl__strides_valid(t)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the strides of tensor `%s` lead out of the address space", what, which);
    }
    if (count > 0 && t->data == NULL) {
        return ddl__error(c, DDL_ERR_ARG, "%s: tensor `%s` has %lld elements but its data pointer is NULL", what, which,
                          (long long)count);
    }
    if (t->device != DDL_HOST) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED,
                          "%s: tensor `%s` is on device %d, but no device plugin is loaded; see "
                          "DDL_PLUGINS",
                          what, which, t->device);
    }
    return DDL_OK;
}

/* Whether two dimensions lead to one element: a steps in one are as far as b in the other, for some a and b within the
 * shape. Three that do so only together are not found. */
static bool ddl__dims_meet(const ddl_tensor *t, int32_t i, int32_t j) {
    uint64_t p = t->strides[i] < 0 ? 0 - (uint64_t)t->strides[i] : (uint64_t)t->strides[i];
    uint64_t q = t->strides[j] < 0 ? 0 - (uint64_t)t->strides[j] : (uint64_t)t->strides[j];
    uint64_t gcd = p;
    for (uint64_t rest = q; rest != 0;) {
        uint64_t next = gcd % rest;
        gcd = rest;
        rest = next;
    }
    return gcd == 0 || (q / gcd < (uint64_t)t->shape[i] && p / gcd < (uint64_t)t->shape[j]);
}

/* An output must have each element in a place of its own: of two values for one place, one would be lost. For tensors
 * that ddl__tensor_check has seen. */
static ddl_status ddl__tensor_check_output(ddl_context *c, const ddl_tensor *t, const char *what, const char *which) {
    bool meet = false;
    if (ddl__is_contiguous(t) || ddl_tensor_count(t) <= 1) {
        return DDL_OK;
    }
    for (int32_t i = 0; i < t->ndim && !meet; i++) {
        meet = t->shape[i] > 1 && t->strides[i] == 0;
        for (int32_t j = 0; j < i && !meet; j++) {
            meet = t->shape[i] > 1 && t->shape[j] > 1 && ddl__dims_meet(t, i, j);
        }
    }
    return !meet ? DDL_OK
                 : ddl__error(c, DDL_ERR_ARG,
                              "%s: the strides of tensor `%s` lead to one element more than once, so it cannot be "
                              "written to; give it memory for each element",
                              what, which);
}

/* >>memory */

/* Memory of ddl_tensor_alloc: a transport's, which peers reach without a copy, or what follows this record. */
typedef struct ddl__lent {
    struct ddl__lent *next;
    void *data;
    uint64_t counted;
    const ddl__endpoint *endpoint; /* whose it is; NULL: ours */
} ddl__lent;

/* The caller's memory is not counted as the context's own. */
static ddl__lent *ddl__lend_own(ddl_context *c, size_t bytes) {
    ddl__base *base = &c->base;
    uint64_t memory = base->memory, peak = base->memory_peak;
    ddl__lent *lent = bytes > SIZE_MAX - 128 ? NULL : ddl__alloc(base, sizeof *lent + 64 + bytes);
    if (lent != NULL) {
        lent->counted = base->memory - memory;
        base->memory = memory;
        base->memory_peak = peak;
        lent->data = (void *)(((uintptr_t)(lent + 1) + 63) & ~(uintptr_t)63);
    }
    return lent;
}

/* From the first transport that lends some; NULL: none does. */
static ddl__lent *ddl__lend_shared(ddl_context *c, size_t bytes) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        ddl__lent *lent = DDL_HAS(e->table, memory_alloc) ? ddl__alloc(&c->base, sizeof *lent) : NULL;
        if (lent != NULL && e->table->memory_alloc(e->self, bytes, &lent->data) == DDL_OK) {
            lent->endpoint = e;
            return lent;
        }
        ddl__free(&c->base, lent);
    }
    return NULL;
}

static ddl__lent *ddl__lend(ddl_context *c, size_t bytes) {
    ddl__lent *lent = ddl__lend_shared(c, bytes);
    if (lent == NULL) {
        lent = ddl__lend_own(c, bytes);
    }
    if (lent != NULL) {
        lent->next = c->lent;
        c->lent = lent;
    }
    return lent;
}

static void ddl__lent_free(ddl_context *c, ddl__lent *lent) {
    if (lent->endpoint != NULL) {
        lent->endpoint->table->memory_free(lent->endpoint->self, lent->data);
    }
    c->base.memory += lent->counted; /* ddl__free takes it off again */
    ddl__free(&c->base, lent);
}

DDL_API ddl_status ddl_tensor_alloc(ddl_context *context, ddl_dtype dtype, int32_t ndim, const int64_t *shape,
                                    ddl_tensor *out_tensor) {
    DDL__TRY(ddl__enter(context));
    ddl_tensor t = ddl_tensor_nd(context, dtype, ndim, shape);
    ddl_status status = DDL_OK;
    if (out_tensor == NULL || (ndim > 0 && shape == NULL)) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_tensor_alloc: %s is NULL",
                            out_tensor == NULL ? "out_tensor" : "shape");
    } else if (ndim < 0 || ndim > DDL_MAX_DIMS) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_tensor_alloc: %d dimensions; 0 to %d are possible", ndim,
                            DDL_MAX_DIMS);
    } else {
        status = ddl__tensor_check(context, &t, "ddl_tensor_alloc", "out_tensor");
    }
    if (status == DDL_OK) {
        size_t bytes = (size_t)ddl_tensor_count(&t) * ddl_dtype_bytes(dtype);
        ddl__lent *lent = ddl__lend(context, bytes);
        if (lent == NULL) {
            status = ddl__error(context, DDL_ERR_NOMEM, "ddl_tensor_alloc: no memory for %zu bytes", bytes);
        } else {
            t.data = lent->data;
            *out_tensor = t;
        }
    }
    ddl__unlock(context);
    return status;
}

DDL_API ddl_status ddl_tensor_free(ddl_context *context, ddl_tensor *tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__enter(context));
    ddl_status status = DDL_ERR_ARG;
    for (ddl__lent **at = &context->lent; *at != NULL; at = &(*at)->next) {
        if ((*at)->data == tensor->data) {
            ddl__lent *gone = *at;
            *at = gone->next;
            ddl__lent_free(context, gone);
            *tensor = (ddl_tensor){0};
            status = DDL_OK;
            break;
        }
    }
    if (status < 0) {
        ddl__error(context, status,
                   "ddl_tensor_free: the memory at %p was not made by ddl_tensor_alloc of this context, or "
                   "was freed before",
                   tensor->data);
    }
    ddl__unlock(context);
    return status;
}

/* >>dlpack */

static const struct {
    ddl_dtype dtype;
    uint8_t code, bits;
} ddl__dlpack_types[] = {
    {DDL_F16, 2, 16}, {DDL_BF16, 4, 16}, {DDL_F32, 2, 32}, {DDL_F64, 2, 64}, {DDL_I8, 0, 8},   {DDL_U8, 1, 8},
    {DDL_I32, 0, 32}, {DDL_U32, 1, 32},  {DDL_I64, 0, 64}, {DDL_U64, 1, 64}, {DDL_BOOL, 6, 8},
};

static ddl_status ddl__dlpack_view(const ddl_dlpack *dlpack, ddl_dtype dtype, ddl_tensor *out_tensor) {
    uintptr_t data = (uintptr_t)dlpack->data + (uintptr_t)dlpack->byte_offset;
    ddl_tensor t = ddl_tensor_nd((const void *)data, dtype, dlpack->ndim, dlpack->shape);
    int64_t count = ddl_tensor_count(&t);
    if (count < 0) {
        return DDL_ERR_ARG;
    }
    bool zero = dlpack->strides != NULL;
    for (int32_t d = 0; dlpack->strides != NULL && d < t.ndim; d++) {
        t.strides[d] = dlpack->strides[d];
        zero = zero && t.strides[d] == 0;
    }
    if (zero && count > 1) { /* one element shown as many: strides of zero would mean contiguous here */
        return DDL_ERR_UNSUPPORTED;
    }
    *out_tensor = t;
    return DDL_OK;
}

DDL_API ddl_status ddl_tensor_from_dlpack(const ddl_dlpack *dlpack, ddl_tensor *out_tensor) {
    if (dlpack == NULL || out_tensor == NULL || dlpack->ndim < 0 || dlpack->ndim > DDL_MAX_DIMS ||
        dlpack->dtype.lanes != 1 || (dlpack->ndim > 0 && dlpack->shape == NULL)) {
        return DDL_ERR_ARG;
    }
    if (dlpack->device.type != 1 && dlpack->device.type != 3) {
        return DDL_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].code == dlpack->dtype.code && ddl__dlpack_types[i].bits == dlpack->dtype.bits) {
            return ddl__dlpack_view(dlpack, ddl__dlpack_types[i].dtype, out_tensor);
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

DDL_API ddl_status ddl_tensor_to_dlpack(ddl_tensor *tensor, ddl_dlpack *out_dlpack) {
    if (tensor == NULL || out_dlpack == NULL || ddl_tensor_count(tensor) < 0) {
        return DDL_ERR_ARG;
    }
    for (size_t i = 0; tensor->device == DDL_HOST && i < DDL__COUNT_OF(ddl__dlpack_types); i++) {
        if (ddl__dlpack_types[i].dtype == tensor->dtype) {
            bool contiguous = ddl__is_contiguous(tensor);
            *out_dlpack = (ddl_dlpack){
                .data = tensor->data,
                .device = {1, 0},
                .ndim = tensor->ndim,
                .dtype = {ddl__dlpack_types[i].code, ddl__dlpack_types[i].bits, 1},
                .shape = tensor->shape,
                .strides = contiguous ? NULL : tensor->strides,
            };
            return DDL_OK;
        }
    }
    return DDL_ERR_UNSUPPORTED;
}

/* >>group/group */
/* group: an ordered set of ranks, what is under way in it, and why it is broken when it is.
 * It must not know how messages are matched or plans are run; p2p and engine keep their lists here. */

enum {
    DDL__GROUP_MAGIC = 0x67726f75,
    DDL__GROUP_FREED = 0x66726565,
    DDL__RECORDS = 256,
    DDL__TOMBSTONES = 64,         /* freed handles that are still known as such */
    DDL__WINDOW_BYTES = 128 * 1024, /* of eager data to one peer that it has not taken, per group and kind */
    /* An eager part of a collective counts as its bytes and this: so that a peer is at most half as many collectives
     * behind as are recorded, and what it calls can still be compared with what was called here. */
    DDL__AHEAD_BYTES = 2 * DDL__WINDOW_BYTES / DDL__RECORDS
};

/* The other side of one peer in one group: how far it is, and how much of ours it may not have taken yet. Bounds what
 * an early sender can make a late receiver store. */
typedef struct ddl__toward {
    uint32_t started;    /* newest collective of the peer that we know it has started */
    /* bytes of eager data for collectives beyond `started`: the older half of the window, the newer */
    uint32_t ahead[2];
    uint32_t ahead_last[2]; /* newest collective in each half */
    uint32_t wanted;        /* the peer asked to be told when we start this collective, */
    bool wants;             /* which we have not done */
    uint32_t p2p_out;    /* eager message bytes that the peer has not said it took */
    uint32_t p2p_in;     /* taken since we last said so */
    struct ddl__step_state *held_first, *held_last; /* sends that wait for the peer to catch up: see engine */
} ddl__toward;

/* bench/check.c measures what the mismatch check and the flight recorder cost, by a build without them. Nobody else
 * defines the macro. */
#ifdef DDL__BENCH_NO_CHECK
enum { DDL__CHECKS = 0 };
#else
enum { DDL__CHECKS = 1 };
#endif

/* One line of the flight recorder. */
typedef struct ddl__flight {
    uint64_t order; /* among the collectives of all groups of this rank */
    uint32_t sequence;
    int32_t root;
    ddl_op op;
    uint8_t kind, dtype;
    int16_t status; /* DDL_IN_PROGRESS while it runs */
    uint8_t nature; /* as in ddl__call */
    int32_t tensors;
    int64_t count; /* of a v-form the elements of all ranks */
    uint64_t detail;
    uint64_t call_hash; /* of this call */
    uint64_t signature; /* of this call and all before it: what its frames carry */
    uint64_t start_ns, end_ns;
    const char *algorithm;
} ddl__flight;

/* What runs collectives of the group by itself: see engine/native.h. */
typedef struct ddl__native {
    const ddl_transport *table;
    void *self, *set; /* set NULL: nothing does */
    uint64_t sequence; /* of its newest operation */
} ddl__native;

/* What a peer said it is calling, before we have called that ourselves. */
typedef struct ddl__announced {
    uint32_t sequence;
    int32_t peer;
    uint64_t call_hash, signature;
    char call[160];
} ddl__announced;

struct ddl_group {
    uint32_t magic;
    uint32_t id, epoch;
    int32_t rank, size;
    int32_t *ranks;   /* world ranks, in group order */
    int32_t *rank_of; /* by world rank, -1: not a member */
    int32_t *host_of; /* by group rank, hosts numbered by first appearance */
    ddl_context *context;
    ddl_group *next;
    char name[64];

    int64_t timeout_ms, stall_ms;
    ddl__tuning tuning;
    int64_t *packed; /* 2 * size: offsets of v-forms that the caller left to us */
    bool user_holds;
    uint32_t buried; /* its number among the freed groups, from 1 */
    uint32_t settings_version; /* cached plans of older settings are not used */

    ddl_status broken; /* DDL_OK, or what all collectives return from now on */
    char broken_text[DDL__SENTENCE_BYTES];

    ddl__toward *flows; /* by group rank */
    ddl_request *posted_first, *posted_last;
    struct ddl__unexpected *unexpected_first, *unexpected_last;
    uint64_t unexpected_bytes;
    int32_t outstanding; /* requests that are not freed */

    uint32_t sequence; /* of the newest collective that was started */
    uint64_t
        signature;     /* and its signature. It covers all calls before: whoever once called something else, and did not
                         * need anybody's answer for it, cannot complete a later call with the others */
    int32_t wants;     /* flows of which somebody waits for us to start one */
    struct ddl__op *ops;            /* running */
    struct ddl__early *early;       /* frames of collectives that this rank has not started */
    struct ddl__cached *cache;      /* plans */
    ddl__native native;
    struct ddl__fast *fast; /* see coll/fast.h */
    ddl__announced announced;
    uint64_t doubt_ns;       /* since when it is known that a peer's call differs from ours; 0: it is not */
    uint32_t doubt_sequence; /* which call */
    uint64_t glanced_ns;     /* when a call on this group last looked for what had come */
    uint64_t fast_ns;        /* when the last one that went the short way began */
    ddl__flight records[DDL__RECORDS];
    uint32_t shown; /* the last that was written while the records are */
    uint32_t agree_sequence; /* of the newest agreement that has ended here */
    bool agreeing;
    struct ddl__agreement *agreements;

    int32_t deaths, deaths_probed; /* among its ranks; of which probes of any rank were told */
    char cause[256]; /* the first death among its ranks: what all errors that come of it say; "" for none */
};

typedef struct ddl__groups {
    ddl_group *first; /* linked by next, those that were freed included: a handle that is used after free is told so */
    uint32_t allocated; /* ids this rank has given out as leader */
    uint32_t buried;
} ddl__groups;

static void ddl__p2p_rank_dead(ddl_group *g, int32_t rank);
static void ddl__ops_fail_all(ddl_group *g);
static void ddl__p2p_group_free(ddl_group *g);
static void ddl__engine_group_free(ddl_group *g);
static void ddl__native_close(ddl_group *g);
static void ddl__agree_group_free(ddl_group *g);

/* >>making */

static ddl_group *ddl__group_find(ddl_context *c, uint32_t id) {
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        if (g->id == id && g->magic == DDL__GROUP_MAGIC) {
            return g;
        }
    }
    return NULL;
}

static void ddl__group_release(ddl_group *g) {
    ddl__base *base = &g->context->base;
    ddl__free(base, g->ranks);
    ddl__free(base, g->rank_of);
    ddl__free(base, g->host_of);
    ddl__free(base, g->flows);
    ddl__free(base, g->packed);
    g->packed = NULL;
    g->ranks = g->rank_of = g->host_of = NULL;
    g->flows = NULL;
}

static void ddl__group_number_hosts(ddl_group *g) {
    ddl_context *c = g->context;
    int32_t hosts = 0;
    for (int32_t i = 0; i < g->size; i++) {
        int32_t j = 0;
        while (j < i && c->links[g->ranks[j]].host != c->links[g->ranks[i]].host) {
            j++;
        }
        g->host_of[i] = j < i ? g->host_of[j] : hosts++;
    }
}

/* Makes the local part of a group; ranks are world ranks. The caller has made sure that all members do the same. */
static ddl_group *ddl__group_new(ddl_context *c, const int32_t *ranks, int32_t size, uint32_t id, uint32_t epoch,
                                 const char *name) {
    ddl_group *g = ddl__alloc(&c->base, sizeof *g);
    if (g == NULL) {
        return NULL;
    }
    g->context = c;
    g->size = size;
    g->id = id;
    g->epoch = epoch;
    g->ranks = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->ranks);
    g->rank_of = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *g->rank_of);
    g->host_of = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->host_of);
    g->flows = ddl__alloc_array(&c->base, (size_t)size, sizeof *g->flows);
    g->packed = ddl__alloc_array(&c->base, (size_t)size, 2 * sizeof *g->packed);
    if (g->packed == NULL || g->ranks == NULL || g->rank_of == NULL || g->host_of == NULL || g->flows == NULL) {
        ddl__group_release(g);
        ddl__free(&c->base, g);
        return NULL;
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        g->rank_of[i] = -1;
    }
    for (int32_t i = 0; i < size; i++) {
        g->ranks[i] = ranks[i];
        g->rank_of[ranks[i]] = i;
    }
    g->rank = g->rank_of[c->rank];
    ddl__group_number_hosts(g);
    snprintf(g->name, sizeof g->name, "%s", name);
    g->timeout_ms = c->settings.timeout_ms;
    g->stall_ms = c->settings.stall_ms;
    g->tuning = c->tuning;
    g->magic = DDL__GROUP_MAGIC;
    g->next = c->groups->first;
    c->groups->first = g;
    return g;
}

/* Gives up the oldest tombstone when there are many: a program that makes and frees groups all day must not grow. */
static void ddl__group_forget(ddl_context *c) {
    ddl_group **oldest = NULL;
    int32_t count = 0;
    for (ddl_group **at = &c->groups->first; *at != NULL; at = &(*at)->next) {
        if ((*at)->magic == DDL__GROUP_FREED && !(*at)->user_holds) {
            count++;
            oldest = oldest == NULL || (*at)->buried < (*oldest)->buried ? at : oldest;
        }
    }
    if (count > DDL__TOMBSTONES) {
        ddl_group *gone = *oldest;
        *oldest = gone->next;
        ddl__free(&c->base, gone);
    }
}

/* Frees what a group holds; the handle itself stays as a tombstone for a while, at most until the context goes. */
static void ddl__group_bury(ddl_group *g) {
    ddl__p2p_group_free(g);
    ddl__engine_group_free(g);
    ddl__agree_group_free(g);
    g->magic = DDL__GROUP_FREED;
    g->buried = ++g->context->groups->buried;
    ddl__group_release(g);
}

/* >>checking */

/* Begins a public call on a group; the context is locked on success. what: the call, for the sentence. */
static inline ddl_status ddl__enter_group(ddl_group *g, const char *what) {
    if (g == NULL || (g->magic != DDL__GROUP_MAGIC && g->magic != DDL__GROUP_FREED)) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter(g->context));
    if (g->magic == DDL__GROUP_FREED) {
        ddl_status status = ddl__error(g->context, DDL_ERR_STATE, "%s: the group \"%s\" was freed", what, g->name);
        ddl__unlock(g->context);
        return status;
    }
    return DDL_OK;
}

/* Refuses a call that was given NULL where something must be; group may be NULL too. */
static ddl_status ddl__refuse_group(ddl_group *g, const char *what, const char *which) {
    DDL__TRY(ddl__enter_group(g, what));
    ddl_status status = ddl__error(g->context, DDL_ERR_ARG, "%s: %s is NULL", what, which);
    ddl__unlock(g->context);
    return status;
}

/* The error of a broken group or an aborted context. */
static ddl_status ddl__group_usable(ddl_group *g, const char *what) {
    if (g->broken != DDL_OK) {
        return ddl__error(g->context, g->broken, "%s on group \"%s\": %s", what, g->name, g->broken_text);
    }
    return DDL_OK;
}

/* Breaks a group for all collectives to come; the first reason stays. */
static void __attribute__((format(printf, 3, 4))) ddl__group_break(ddl_group *g, ddl_status status, const char *format,
                                                                  ...) {
    if (g->broken != DDL_OK) {
        return;
    }
    g->broken = status;
    va_list args;
    va_start(args, format);
    vsnprintf(g->broken_text, sizeof g->broken_text, format, args);
    va_end(args);
    ddl__ops_fail_all(g);
    ddl__changed(g->context);
}

/* What may be the reason for all members. */
static bool ddl__may_break(ddl_status status) {
    return status == DDL_ERR_MISMATCH || status == DDL_ERR_TIMEOUT || status == DDL_ERR_NOMEM ||
           status == DDL_ERR_PEER || status == DDL_ERR_SYSTEM || status == DDL_ERR_UNSUPPORTED ||
           status == DDL_ERR_INTERNAL;
}

/* Breaks the group here and at all members, with one sentence. */
static void __attribute__((format(printf, 4, 5))) ddl__break_everywhere(ddl_context *c, ddl_group *g, ddl_status status,
                                                                       const char *format, ...) {
    char text[DDL__SENTENCE_BYTES - 128];
    uint8_t payload[DDL__NOTE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, (uint32_t)-(int32_t)status);
    ddl__put_string(&w, text);
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && c->links[g->ranks[i]].life == DDL__ALIVE) {
            ddl__frame f = {.type = DDL__FRAME_MISMATCH, .group = g->id, .epoch = g->epoch};
            ddl__tell(c, g->ranks[i], f, payload, w.at);
        }
    }
    ddl__group_break(g, status, "%s", text);
}

/* The peer's epoch and membership; NULL when the frame is of a group that is gone or not yet there. */
static ddl_group *ddl__frame_group(ddl_context *c, int32_t peer, const ddl__frame *f) {
    ddl_group *g = ddl__group_find(c, f->group);
    return g != NULL && g->epoch == f->epoch && g->rank_of[peer] >= 0 ? g : NULL;
}

/* >>failure */

/* A rank died: collectives of its groups cannot end any more, messages with it neither. Each group reports the first
 * death among its ranks: those that follow are mostly its ripples. */
static void ddl__groups_rank_dead(ddl_context *c, int32_t rank, const char *text) {
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC && g->rank_of[rank] >= 0) {
            g->deaths++;
            if (g->cause[0] == 0) {
                snprintf(g->cause, sizeof g->cause, "%s", text);
            }
            ddl__group_break(g, DDL_ERR_PEER, "%s", g->cause);
            ddl__p2p_rank_dead(g, g->rank_of[rank]);
        }
    }
    ddl__changed(c);
}

/* 1 when a rank has left in order and nothing of it is still on its way: waiting for it is in vain. Where its goodbye
 * came through another rank, its own last words may lie unread in a connection that has brought nothing so far. */
static bool ddl__is_drained(const ddl_group *g, int32_t group_rank) {
    const ddl__link *l = &g->context->links[g->ranks[group_rank]];
    bool settled = ddl__now_ns() - l->missed_ns > DDL__GOODBYE_NS; /* why it left may still come from somebody else */
    return l->life == DDL__LEFT && l->drained && settled;
}

static bool ddl__is_gone(const ddl_group *g, int32_t rank) {
    return rank != g->rank && (g->context->links[g->ranks[rank]].life == DDL__DEAD || ddl__is_drained(g, rank));
}

/* All others of a group that had others are gone. */
static bool ddl__is_alone(const ddl_group *g) {
    bool alone = g->size > 1;
    for (int32_t i = 0; alone && i < g->size; i++) {
        alone = i == g->rank || ddl__is_gone(g, i);
    }
    return alone;
}
static const char ddl__why_alone[] = "all others are dead or have left the job";

/* >>p2p/request */
/* p2p, first part: requests, and waiting for one, any or all of them.
 * A request knows what it is through its ops table; the engine brings its own. */

enum { DDL__REQUEST_MAGIC = 0x72657175, DDL__REQUESTS_CHUNK = 64 };
#define DDL__ATTEND_NS (5 * DDL__NS_PER_MS)
#define DDL__ABSENT_NS (500 * DDL__NS_PER_MS) /* longer between two looks: nobody waited, or the process was stopped */

typedef enum ddl__request_state {
    DDL__REQUEST_FREE = 0,
    DDL__REQUEST_ACTIVE = 1,
    DDL__REQUEST_DONE = 2,
    DDL__REQUEST_IDLE = 3 /* persistent, not started */
} ddl__request_state;

typedef struct ddl__request_ops {
    /* Ends it now with r->status set: takes its memory back from whoever uses it. */
    void (*abandon)(ddl_context *c, ddl_request *r);
    /* Says for whom or what it waits, for the stall report and the timeout's sentence. */
    void (*explain)(ddl_context *c, ddl_request *r, ddl__text *text);
    /* Every 10 ms or so while somebody waits for it; waited_ns: for how long. */
    void (*tick)(ddl_context *c, ddl_request *r, uint64_t waited_ns);
    int32_t (*expect)(ddl_context *c, ddl_request *r); /* world rank, or -1 */
    void (*release)(ddl_context *c, ddl_request *r); /* frees what `kept` holds; may be NULL */
} ddl__request_ops;

struct ddl_request {
    uint32_t magic;
    uint32_t generation; /* grows with each use: an old cookie is known */
    int32_t index;       /* in the pool */
    uint8_t state;
    bool persistent, is_recv;
    bool unseen; /* no handle of it was given out */
    ddl_context *context;
    ddl_group *group;
    const ddl__request_ops *ops;
    ddl_status status;
    ddl_info info;
    char *why; /* the error's sentence; NULL: the status text has to do */
    uint64_t attended_ns, waited_ns; /* when somebody last asked for it; how long somebody has waited */
    uint64_t next_report_ns;
    ddl_request *next; /* free list, or posted receives */
    void *op;          /* of the engine */
    void *kept;        /* a persistent request's own copy of its call */
    ddl_request *parent; /* of which this is a part: see coll/many.h */
    int32_t parts;
    void (*parts_done)(ddl_context *c, ddl_request *r);

    /* messages */
    void *packed; /* scratch for a strided tensor, or NULL */
    char *data;
    uint64_t bytes, moved, total; /* total: what the sender says */
    int32_t peer, tag;            /* group rank; receives may say any */
    uint64_t remote;              /* cookie of the other side's request */
    ddl__landing *landing;
    bool matched;
    ddl__outgoing out;
    ddl_tensor tensor; /* the last: not cleared for a new request. Of one that is not packed only its type is set */
};

/* Requests come in chunks that stay until the end: a pointer that is kept too long finds a free request, not
 * rubbish. */
typedef struct ddl__requests {
    ddl_request **chunks;
    int32_t chunk_count;
    ddl_request *free_first, *free_last; /* first in, first out, so that reuse comes late: but for those nobody saw */
} ddl__requests;

/* >>pool */

static ddl_status ddl__requests_grow(ddl_context *c) {
    ddl__requests *q = c->requests;
    ddl_request **chunks = ddl__alloc_array(&c->base, (size_t)q->chunk_count + 1, sizeof *chunks);
    ddl_request *chunk = ddl__alloc_array(&c->base, DDL__REQUESTS_CHUNK, sizeof *chunk);
    if (chunks == NULL || chunk == NULL) {
        ddl__free(&c->base, chunks);
        ddl__free(&c->base, chunk);
        return ddl__error(c, DDL_ERR_NOMEM, "no memory for more requests");
    }
    if (q->chunks != NULL) {
        memcpy(chunks, q->chunks, (size_t)q->chunk_count * sizeof *chunks);
        ddl__free(&c->base, q->chunks);
    }
    q->chunks = chunks;
    q->chunks[q->chunk_count] = chunk;
    for (int32_t i = 0; i < DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &chunk[i];
        r->magic = DDL__REQUEST_MAGIC;
        r->index = q->chunk_count * DDL__REQUESTS_CHUNK + i;
        r->context = c;
        r->next = q->free_first;
        q->free_first = r;
        q->free_last = q->free_last == NULL ? r : q->free_last;
    }
    q->chunk_count++;
    return DDL_OK;
}

/* Takes a request off the free list as it is. */
static ddl_status ddl__request_take(ddl_context *c, ddl_request **out) {
    ddl__requests *q = c->requests;
    if (q->free_first == NULL) {
        DDL__TRY(ddl__requests_grow(c));
    }
    ddl_request *r = q->free_first;
    q->free_first = r->next;
    if (q->free_first == NULL) {
        q->free_last = NULL;
    }
    *out = r;
    return DDL_OK;
}

/* Puts one back that nobody has seen: it is the next to be taken, while it is in the cache. */
static void ddl__request_untake(ddl_context *c, ddl_request *r) {
    ddl__requests *q = c->requests;
    r->next = q->free_first;
    q->free_first = r;
    q->free_last = q->free_last == NULL ? r : q->free_last;
}

/* Makes a new request of one that was taken. */
static void ddl__request_init(ddl_group *g, const ddl__request_ops *ops, ddl_request *r) {
    ddl_context *c = g->context;
    uint32_t generation = r->generation + 1;
    int32_t index = r->index;
    memset(r, 0, offsetof(ddl_request, tensor));
    r->magic = DDL__REQUEST_MAGIC;
    r->generation = generation;
    r->index = index;
    r->state = DDL__REQUEST_ACTIVE;
    r->context = c;
    r->group = g;
    r->ops = ops;
    r->info.source = DDL_NO_RANK;
    g->outstanding++;
    c->stats.ops_started++;
}

static ddl_status ddl__request_new(ddl_group *g, const ddl__request_ops *ops, ddl_request **out) {
    DDL__TRY(ddl__request_take(g->context, out));
    ddl__request_init(g, ops, *out);
    return DDL_OK;
}

static void ddl__request_release(ddl_request *r) {
    ddl_context *c = r->context;
    ddl__requests *q = c->requests;
    ddl__free(&c->base, r->why);
    if (r->ops->release != NULL && r->kept != NULL) {
        r->ops->release(c, r);
    }
    ddl__free(&c->base, r->kept);
    ddl__scratch_put(c, r->packed);
    r->kept = NULL;
    r->why = NULL;
    r->packed = NULL;
    r->state = DDL__REQUEST_FREE;
    r->group->outstanding--;
    if (r->unseen) {
        ddl__request_untake(c, r);
        return;
    }
    r->next = NULL;
    if (q->free_last != NULL) {
        q->free_last->next = r;
    } else {
        q->free_first = r;
    }
    q->free_last = r;
}

static uint64_t ddl__request_cookie(const ddl_request *r) {
    return (uint64_t)r->generation << 32 | (uint32_t)r->index;
}

/* The request of a cookie that came from a peer; NULL when it is over, or never was. */
static ddl_request *ddl__request_of(ddl_context *c, uint64_t cookie) {
    uint32_t index = (uint32_t)cookie;
    if (index >= (uint32_t)(c->requests->chunk_count * DDL__REQUESTS_CHUNK)) {
        return NULL;
    }
    ddl_request *r = &c->requests->chunks[index / DDL__REQUESTS_CHUNK][index % DDL__REQUESTS_CHUNK];
    return r->generation == (uint32_t)(cookie >> 32) && r->state == DDL__REQUEST_ACTIVE ? r : NULL;
}

/* >>ending */

static void ddl__request_done(ddl_request *r, ddl_status status) {
    ddl_context *c = r->context;
    r->status = status;
    r->info.status = status;
    r->state = DDL__REQUEST_DONE;
    *(status < 0 ? &c->stats.ops_failed : &c->stats.ops_completed) += 1; /* two sums would become one vector */
    if (r->parent != NULL && --r->parent->parts == 0) {
        r->parent->parts_done(c, r->parent);
    }
    ddl__changed(c);
}

static void __attribute__((format(printf, 3, 4))) ddl__request_fail(ddl_request *r, ddl_status status,
                                                                   const char *format, ...) {
    char text[DDL__SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ddl__free(&r->context->base, r->why);
    r->why = ddl__copy_string(&r->context->base, text);
    ddl__request_done(r, status);
}

/* Hands the outcome to the caller and frees the request; a persistent one becomes idle. */
static ddl_status ddl__request_report(ddl_request **slot, ddl_info *out_info) {
    ddl_request *r = *slot;
    ddl_status status = r->status;
    if (out_info != NULL) {
        *out_info = r->info;
    }
    if (status < 0) {
        ddl__error(r->context, status, "%s", r->why != NULL ? r->why : ddl_status_text(status));
    }
    if (r->persistent) {
        r->waited_ns = r->next_report_ns = 0;
        r->state = DDL__REQUEST_IDLE;
        return status;
    }
    ddl__request_release(r);
    *slot = NULL;
    return status;
}

/* >>waiting */

typedef struct ddl__waiting {
    ddl_request **requests;
    int32_t count;
    int32_t at;   /* all before this one are done: a wait for all looks only ahead */
} ddl__waiting;

static bool ddl__is_pending(const ddl_request *r) { return r != NULL && r->state == DDL__REQUEST_ACTIVE; }

static bool ddl__all_done(ddl_context *c, void *arg) {
    (void)c;
    ddl__waiting *w = arg;
    while (w->at < w->count && !ddl__is_pending(w->requests[w->at])) {
        w->at++;
    }
    return w->at == w->count;
}

static bool ddl__any_done(ddl_context *c, void *arg) {
    (void)c;
    ddl__waiting *w = arg;
    bool pending = false;
    for (int32_t i = 0; i < w->count; i++) {
        const ddl_request *r = w->requests[i];
        if (r != NULL && r->state == DDL__REQUEST_DONE) {
            return true;
        }
        pending = pending || ddl__is_pending(r);
    }
    return !pending;
}

static int32_t ddl__wait_expect(ddl_context *c, void *arg) {
    ddl__waiting *w = arg;
    for (int32_t i = w->at; i < w->count; i++) {
        if (ddl__is_pending(w->requests[i])) {
            return w->requests[i]->ops->expect(c, w->requests[i]);
        }
    }
    return -1;
}

static void ddl__report_stall(ddl_context *c, ddl_request *r, uint64_t waited) {
    char line[DDL__SENTENCE_BYTES];
    ddl__text text = {line, sizeof line, 0};
    r->ops->explain(c, r, &text);
    ddl__log(&c->base, DDL_LOG_WARN, "stalled for %.1f s: %s", (double)waited / 1e9, line);
}

/* The deadline passed: the request ends with a sentence that says for whom it waited. */
static void ddl__request_expire(ddl_context *c, ddl_request *r) {
    char line[DDL__SENTENCE_BYTES];
    ddl__text text = {line, sizeof line, 0};
    r->ops->explain(c, r, &text);
    r->ops->abandon(c, r);
    if (ddl__is_pending(r)) {
        ddl__request_fail(r, DDL_ERR_TIMEOUT,
                          "%s; the deadline of %.1f s passed. A rank that is slow, stopped or in "
                          "other code is the usual cause; DDL_TIMEOUT_MS or ddl_group_set change the deadline",
                          line, (double)r->waited_ns / 1e9);
    }
}

/* Somebody waits for the request, asks for it again and again, or a progress thread watches it: only that time counts
 * for reports and deadlines, not the time in which nobody looks, or the program is stopped. */
static void ddl__request_attend(ddl_context *c, ddl_request *r, uint64_t now, bool may_expire) {
    uint64_t gap = now - DDL__MIN(r->attended_ns, now);
    r->waited_ns += gap < DDL__ABSENT_NS ? gap : 0;
    r->attended_ns = now;
    r->ops->tick(c, r, r->waited_ns);
    int64_t stall_ms = r->group->stall_ms, timeout_ms = r->group->timeout_ms;
    uint64_t stall = (uint64_t)stall_ms * DDL__NS_PER_MS;
    if (ddl__is_pending(r) && stall_ms > 0 && r->waited_ns >= stall && now >= r->next_report_ns) {
        r->next_report_ns = now + stall;
        ddl__report_stall(c, r, r->waited_ns);
    }
    if (ddl__is_pending(r) && may_expire && timeout_ms > 0 && r->waited_ns >= (uint64_t)timeout_ms * DDL__NS_PER_MS) {
        ddl__request_expire(c, r);
    }
}

static void ddl__wait_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__waiting *w = arg;
    for (int32_t i = w->at; i < w->count; i++) {
        if (ddl__is_pending(w->requests[i])) {
            ddl__request_attend(c, w->requests[i], now, true);
        }
    }
}

/* What this rank is in, for the stall reports of others. */
static const char *ddl__wait_name(const ddl_request *r) {
    return r->op != NULL ? "ddl_wait for a collective" : r->is_recv ? "ddl_recv" : "ddl_send";
}

/* Waits for all, or for any one. The lock is held. */
static void ddl__wait_requests(ddl_context *c, ddl_request **requests, int32_t count, bool any) {
    ddl__waiting waiting = {.requests = requests, .count = count};
    if (any ? ddl__any_done(c, &waiting) : ddl__all_done(c, &waiting)) {
        return; /* many sends have ended when they were started */
    }
    /* Each request has its own deadline, which ends it alone: see ddl__request_attend. */
    ddl__wait w = {.done = any ? ddl__any_done : ddl__all_done,
                   .tick = ddl__wait_tick,
                   .expect = ddl__wait_expect,
                   .arg = &waiting,
                   .deadline = DDL__NEVER};
    if (ddl__wait_shortly(c, &w)) {
        return;
    }
    const char *doing = c->doing;
    uint64_t start = ddl__now_ns();
    for (int32_t i = 0; i < count; i++) {
        if (ddl__is_pending(requests[i])) {
            requests[i]->attended_ns = start;
            c->doing = c->doing != NULL ? c->doing : ddl__wait_name(requests[i]);
        }
    }
    ddl__wait_for(c, &w);
    c->doing = doing;
    c->stats.wait_ns += ddl__now_ns() - start;
}

/* >>public */

static ddl_status ddl__request_check(const ddl_request *r, const char *what) {
    if (r->magic != DDL__REQUEST_MAGIC) {
        return DDL_ERR_ARG;
    }
    if (r->state == DDL__REQUEST_FREE) {
        return ddl__error(r->context, DDL_ERR_STATE, "%s: the request has already been waited for or freed", what);
    }
    return DDL_OK;
}

/* Locks the context of the first request that is not NULL; *out NULL: there is none. */
static ddl_status ddl__enter_requests(ddl_request **requests, int32_t count, const char *what, ddl_context **out) {
    *out = NULL;
    if (count < 0 || (requests == NULL && count > 0)) {
        return DDL_ERR_ARG;
    }
    for (int32_t i = 0; i < count; i++) {
        ddl_request *r = requests[i];
        if (r == NULL) {
            continue;
        }
        if (*out == NULL) {
            if (r->magic != DDL__REQUEST_MAGIC) {
                return DDL_ERR_ARG;
            }
            DDL__TRY(ddl__enter(r->context));
            *out = r->context;
        }
        ddl_status status = r->magic == DDL__REQUEST_MAGIC && r->context != *out
                                ? ddl__error(*out, DDL_ERR_ARG, "%s: the requests are of different contexts", what)
                                : ddl__request_check(r, what);
        if (status < 0) {
            ddl__unlock(*out);
            return status;
        }
    }
    return DDL_OK;
}

static ddl_status ddl__refuse_requests(ddl_request **requests, int32_t count, const char *what, const char *which) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, what, &c));
    if (c != NULL) {
        ddl__error(c, DDL_ERR_ARG, "%s: %s is NULL", what, which);
        ddl__unlock(c);
    }
    return DDL_ERR_ARG;
}

/* Reports all requests; the first error by index is the result. */
static ddl_status ddl__report_all(ddl_context *c, ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_status first = DDL_OK;
    for (int32_t i = count - 1; i >= 0; i--) { /* backwards: the first error is written last and stays */
        ddl_info info = {.source = DDL_NO_RANK, .status = DDL_OK};
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            ddl_status status = ddl__request_report(&requests[i], &info);
            first = status < 0 ? status : first;
        }
        if (out_infos != NULL) {
            out_infos[i] = info;
        }
    }
    (void)c;
    return first;
}

/* What a NULL request brings. */
static void ddl__no_infos(ddl_info *out_infos, int32_t count) {
    for (int32_t i = 0; out_infos != NULL && i < count; i++) {
        out_infos[i] = (ddl_info){.source = DDL_NO_RANK};
    }
}

DDL_API ddl_status ddl_wait_all(ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_all", &c));
    if (c == NULL) {
        ddl__no_infos(out_infos, count);
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, false);
    ddl_status status = ddl__report_all(c, requests, count, out_infos);
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_wait(ddl_request **request, ddl_info *out_info) {
    return request == NULL ? DDL_ERR_ARG : ddl_wait_all(request, 1, out_info);
}

/* A loop of tests is a wait too: who is missing is asked for, and deadlines pass. Not for each call of a tight loop. */
static void ddl__attend_all(ddl_context *c, ddl__waiting *w) {
    uint64_t now = ddl__now_ns();
    for (int32_t i = w->at; i < w->count; i++) {
        ddl_request *r = w->requests[i];
        if (ddl__is_pending(r) && now - DDL__MIN(r->attended_ns, now) > DDL__ATTEND_NS) {
            ddl__request_attend(c, r, now, true);
        }
    }
}

DDL_API ddl_status ddl_test_all(ddl_request **requests, int32_t count, ddl_info *out_infos) {
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_test_all", &c));
    if (c == NULL) {
        ddl__no_infos(out_infos, count);
        return DDL_OK;
    }
    ddl__waiting w = {.requests = requests, .count = count};
    if (!ddl__all_done(c, &w) && !c->polling) {
        ddl__poll(c, ddl__wait_expect(c, &w));
        ddl__look(c, ddl__now_ns());
    }
    ddl__attend_all(c, &w);
    ddl_status status = DDL_IN_PROGRESS;
    if (ddl__all_done(c, &w)) {
        status = ddl__report_all(c, requests, count, out_infos);
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_test(ddl_request **request, ddl_info *out_info) {
    return request == NULL ? DDL_ERR_ARG : ddl_test_all(request, 1, out_info);
}

DDL_API ddl_status ddl_wait_some(ddl_request **requests, int32_t count, int32_t *out_done, int32_t *out_indices,
                                 ddl_info *out_infos) {
    ddl_context *c;
    if (out_done == NULL || (out_indices == NULL && count > 0)) {
        return ddl__refuse_requests(requests, count, "ddl_wait_some", out_done == NULL ? "out_done" : "out_indices");
    }
    *out_done = 0;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_some", &c));
    if (c == NULL) {
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, true);
    ddl_status first = DDL_OK;
    for (int32_t i = 0; i < count; i++) {
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            ddl_info info;
            ddl_status status = ddl__request_report(&requests[i], &info);
            first = first < 0 ? first : status;
            if (out_infos != NULL) {
                out_infos[*out_done] = info;
            }
            out_indices[(*out_done)++] = i;
        }
    }
    ddl__unlock(c);
    return first;
}

DDL_API ddl_status ddl_wait_any(ddl_request **requests, int32_t count, int32_t *out_index, ddl_info *out_info) {
    ddl_context *c;
    if (out_index == NULL) {
        return ddl__refuse_requests(requests, count, "ddl_wait_any", "out_index");
    }
    *out_index = -1;
    DDL__TRY(ddl__enter_requests(requests, count, "ddl_wait_any", &c));
    if (c == NULL) {
        return DDL_OK;
    }
    ddl__wait_requests(c, requests, count, true);
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < count && *out_index < 0; i++) {
        if (requests[i] != NULL && requests[i]->state == DDL__REQUEST_DONE) {
            *out_index = i;
            status = ddl__request_report(&requests[i], out_info);
        }
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_request_free(ddl_request **request) {
    if (request == NULL || *request == NULL) {
        return DDL_OK;
    }
    ddl_context *c;
    DDL__TRY(ddl__enter_requests(request, 1, "ddl_request_free", &c));
    ddl_status status = DDL_OK;
    if (ddl__is_pending(*request)) {
        status = ddl__error(c, DDL_ERR_STATE, "ddl_request_free: the request is still running; wait for it first");
    } else {
        if ((*request)->persistent && (*request)->state == DDL__REQUEST_DONE) {
            ddl__request_report(request, NULL);
        }
        ddl__request_release(*request);
        *request = NULL;
    }
    ddl__unlock(c);
    return status;
}

/* >>p2p/match */
/* p2p, second part: which message meets which receive, and how its bytes travel.
 *
 *     eager       P2P(tag, total, data)                       up to 64 KiB, while the receiver's window lasts
 *     rendezvous  RTS(tag, total, cookie) -> CTS(cookie, cookie) -> DATA(cookie) ...   frames of up to 1 MiB
 *
 * In P2P and RTS frames the low half of `sequence` is the tag and the high half credit, `signature` is the size of the
 * whole message, the low byte of `flags` its dtype. P2P and RTS frames of one pair and group arrive in the order they
 * were sent, and are matched in that order. */

enum {
    DDL__P2P_EAGER_BYTES = 64 * 1024,
    DDL__DATA_GIVEN_UP = 1, /* flag of DATA: the sender's request has ended */
    DDL__TAG_LIST_BITS = 15 /* of the tags of making a group: hash of the name, then of the list */
};
#define DDL__RIVAL_NS (1000 * DDL__NS_PER_MS)

/* A message that nobody has asked for yet: its data, or the offer of it. */
typedef struct ddl__unexpected {
    struct ddl__unexpected *next;
    int32_t source, tag; /* group rank */
    ddl_dtype dtype;
    bool is_offer;
    uint64_t bytes, cookie, arrived_ns; /* the last of ddl's own alone */
    unsigned char data[];
} ddl__unexpected;

/* >>sending */

/* Credit for what we took of the peer rides along, so that a conversation needs no messages for it. */
static ddl__frame ddl__envelope(ddl_group *g, uint8_t type, int32_t peer, int32_t tag, ddl_dtype dtype,
                                uint64_t bytes) {
    ddl__toward *flow = &g->flows[peer];
    uint64_t credit = flow->p2p_in;
    flow->p2p_in = 0;
    return (ddl__frame){.type = type,
                        .flags = (uint16_t)dtype,
                        .group = g->id,
                        .epoch = g->epoch,
                        .sequence = credit << 32 | (uint32_t)tag,
                        .signature = bytes};
}

static ddl__frame ddl__p2p_frame(const ddl_request *r, uint8_t type) {
    return ddl__envelope(r->group, type, r->peer, r->tag, r->tensor.dtype, r->bytes);
}

/* May so many bytes go to a peer before it asks for them? */
static bool ddl__goes_eagerly(const ddl_group *g, int32_t peer, uint64_t bytes) {
    return bytes <= DDL__P2P_EAGER_BYTES && g->flows[peer].p2p_out + bytes + DDL__FRAME_BYTES <= DDL__WINDOW_BYTES;
}

static int32_t ddl__world_rank(const ddl_request *r) { return r->group->ranks[r->peer]; }

static void ddl__send_failed(ddl_request *r, ddl_status status) {
    ddl__request_fail(r, status == DDL_ERR_PEER ? DDL_ERR_PEER : status,
                      "send of %llu bytes to rank %d of group \"%s\" (tag %d): %s", (unsigned long long)r->bytes,
                      r->peer, r->group->name, r->tag,
                      r->group->cause[0] != 0 && r->context->links[ddl__world_rank(r)].life == DDL__DEAD
                          ? r->group->cause
                          : "its link is gone or it has left the job");
}

static void ddl__send_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    (void)c;
    ddl_request *r = out->owner;
    if (r->state != DDL__REQUEST_ACTIVE) {
        return;
    }
    if (status < 0) {
        ddl__send_failed(r, status);
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

/* Sends frame after frame of a rendezvous until the transport borrows one. */
static void ddl__send_data(ddl_context *c, ddl_request *r) {
    while (r->moved < r->bytes) {
        ddl__frame f = {
            .type = DDL__FRAME_DATA, .group = r->group->id, .epoch = r->group->epoch, .sequence = r->remote};
        f.bytes = (uint32_t)DDL__MIN(r->bytes - r->moved, (uint64_t)DDL__FRAME_MAX_PAYLOAD);
        const char *at = r->data + r->moved;
        r->moved += f.bytes;
        ddl_status status = ddl__post(c, ddl__world_rank(r), &r->out, &f, at);
        if (status == DDL_IN_PROGRESS) {
            return;
        }
        if (status < 0) {
            ddl__send_failed(r, status);
            return;
        }
    }
    ddl__request_done(r, DDL_OK);
}

static void ddl__send_data_done(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl_request *r = out->owner;
    if (r->state != DDL__REQUEST_ACTIVE) {
        return;
    }
    if (status < 0) {
        ddl__send_failed(r, status);
    } else {
        ddl__send_data(c, r);
    }
}

static void ddl__offer(ddl_context *c, ddl_request *r) {
    uint8_t payload[8];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u64(&w, ddl__request_cookie(r));
    ddl__toward *flow = &r->group->flows[r->peer];
    uint32_t credit = flow->p2p_in;
    if (ddl__tell(c, ddl__world_rank(r), ddl__p2p_frame(r, DDL__FRAME_RTS), payload, sizeof payload) < 0) {
        flow->p2p_in = credit; /* it did not ride along */
        ddl__request_fail(r, DDL_ERR_NOMEM,
                          "send of %llu bytes to rank %d of group \"%s\" (tag %d): no memory to offer them",
                          (unsigned long long)r->bytes, r->peer, r->group->name, r->tag);
    }
}

static void ddl__send_start(ddl_context *c, ddl_request *r) {
    r->out.owner = r;
    if (c->links[ddl__world_rank(r)].life == DDL__DEAD) {
        ddl__send_failed(r, DDL_ERR_PEER);
        return;
    }
    if (!ddl__goes_eagerly(r->group, r->peer, r->bytes)) {
        r->out.done = ddl__send_data_done;
        ddl__offer(c, r);
        return;
    }
    r->group->flows[r->peer].p2p_out += (uint32_t)r->bytes + DDL__FRAME_BYTES;
    r->out.done = ddl__send_done;
    r->matched = true; /* nothing more is asked of the receiver */
    ddl__frame f = ddl__p2p_frame(r, DDL__FRAME_P2P);
    f.bytes = (uint32_t)r->bytes;
    ddl_status status = ddl__post(c, ddl__world_rank(r), &r->out, &f, r->data);
    if (status == DDL_OK) {
        ddl__request_done(r, DDL_OK);
    } else if (status < 0) {
        ddl__send_failed(r, status);
    }
}

/* >>receiving */

static bool ddl__accepts(const ddl_request *r, int32_t source, int32_t tag) {
    return (r->peer == DDL_ANY_SOURCE || r->peer == source) && (r->tag == tag || (r->tag == DDL_ANY_TAG && tag >= 0));
}

static void ddl__posted_unlink(ddl_group *g, ddl_request *r) {
    ddl_request *last = NULL;
    for (ddl_request **at = &g->posted_first; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == r) {
            *at = r->next;
            g->posted_last = g->posted_last == r ? last : g->posted_last;
            r->next = NULL;
            return;
        }
    }
}

static void ddl__posted_append(ddl_group *g, ddl_request *r) {
    r->next = NULL;
    if (g->posted_last != NULL) {
        g->posted_last->next = r;
    } else {
        g->posted_first = r;
    }
    g->posted_last = r;
}

/* All sizes are powers of two, and a division takes as long as the rest. */
static uint64_t ddl__elements(uint64_t bytes, ddl_dtype dtype) {
    return bytes >> __builtin_ctzll(ddl__dtype_bytes(dtype));
}

static void ddl__recv_done(ddl_request *r) {
    if (r->packed != NULL) {
        ddl__pack_bytes(&r->tensor, r->packed, r->total, true);
    }
    r->info.count = (int64_t)ddl__elements(r->total, r->tensor.dtype);
    ddl__request_done(r, DDL_OK);
}

/* Takes eager bytes off the sender's window, and says so when half of it is used. */
static void ddl__p2p_took(ddl_context *c, ddl_group *g, int32_t source, uint64_t bytes) {
    ddl__toward *flow = &g->flows[source];
    flow->p2p_in += (uint32_t)bytes + DDL__FRAME_BYTES;
    if (flow->p2p_in >= DDL__WINDOW_BYTES / 2) {
        uint8_t payload[4];
        ddl__writer w = ddl__writer_of(payload, sizeof payload);
        ddl__put_u32(&w, flow->p2p_in);
        ddl__frame f = {.type = DDL__FRAME_CREDIT, .group = g->id, .epoch = g->epoch};
        if (ddl__tell(c, g->ranks[source], f, payload, sizeof payload) == DDL_OK) {
            flow->p2p_in = 0; /* else it goes with the next message */
        }
    }
}

static void ddl__recv_too_small(ddl_request *r, int32_t source, int32_t tag, uint64_t bytes) {
    ddl__request_fail(
        r, DDL_ERR_TRUNCATED,
        "receive from rank %d of group \"%s\" (tag %d): the message has %llu bytes, the buffer %llu; it stays "
        "to be received with a larger one",
        source, r->group->name, tag, (unsigned long long)bytes, (unsigned long long)r->bytes);
}

static void ddl__recv_other_type(ddl_request *r, int32_t source, int32_t tag, ddl_dtype theirs) {
    ddl__request_fail(
        r, DDL_ERR_MISMATCH,
        "receive from rank %d of group \"%s\" (tag %d): the message is of type %s, the buffer of type %s; it "
        "stays to be received with the right type, or as u8",
        source, r->group->name, tag, ddl_dtype_name(theirs), ddl_dtype_name(r->tensor.dtype));
}

static void ddl__recv_in_pieces(ddl_request *r, int32_t source, int32_t tag, uint64_t bytes) {
    ddl__request_fail(
        r, DDL_ERR_MISMATCH,
        "receive from rank %d of group \"%s\" (tag %d): the message has %llu bytes, which is no whole number of %s; it "
        "stays to be received as u8",
        source, r->group->name, tag, (unsigned long long)bytes, ddl_dtype_name(r->tensor.dtype));
}

/* Checks a message against the receive that it meets. False: the receive has ended with an error, the message stays. */
static bool ddl__recv_fits(ddl_request *r, int32_t source, int32_t tag, ddl_dtype dtype, uint64_t bytes) {
    r->info.source = source;
    r->info.tag = tag;
    if (bytes > r->bytes) {
        ddl__recv_too_small(r, source, tag, bytes);
        return false;
    }
    if (dtype != r->tensor.dtype && dtype != DDL_U8 && r->tensor.dtype != DDL_U8) {
        ddl__recv_other_type(r, source, tag, dtype);
        return false;
    }
    if (bytes % ddl__dtype_bytes(r->tensor.dtype) != 0) {
        ddl__recv_in_pieces(r, source, tag, bytes);
        return false;
    }
    r->matched = true;
    r->total = bytes;
    return true;
}

/* Accepts an offer: the data may come. False: no memory to say so; the receive has ended, the offer stays. */
static bool ddl__accept(ddl_context *c, ddl_request *r, int32_t source, uint64_t cookie) {
    uint8_t payload[16];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u64(&w, cookie);
    ddl__put_u64(&w, ddl__request_cookie(r));
    ddl__frame f = {.type = DDL__FRAME_CTS, .group = r->group->id, .epoch = r->group->epoch};
    if (ddl__tell(c, r->group->ranks[source], f, payload, sizeof payload) < 0) {
        ddl__request_fail(r, DDL_ERR_NOMEM, "receive from rank %d of group \"%s\" (tag %d): no memory to ask for the "
                          "data; the message stays to be received", source, r->group->name, r->info.tag);
        return false;
    }
    r->remote = cookie;
    r->peer = source;
    if (r->total == 0) {
        ddl__recv_done(r); /* no data follows */
    }
    return true;
}

/* The first receive that was posted for such a message, taken off the list if it fits; NULL: there is none (a receive
 * that does not fit has ended, and the next one is asked). */
static ddl_request *ddl__posted_take(ddl_group *g, int32_t source, int32_t tag, ddl_dtype dtype, uint64_t bytes) {
    ddl_request *next;
    for (ddl_request *r = g->posted_first; r != NULL; r = next) {
        next = r->next;
        if (ddl__accepts(r, source, tag)) {
            ddl__posted_unlink(g, r);
            if (ddl__recv_fits(r, source, tag, dtype, bytes)) {
                return r;
            }
        }
    }
    return NULL;
}

static ddl_status ddl__keep_unexpected(ddl_context *c, ddl_group *g, int32_t source, const ddl__frame *f, bool is_offer,
                                       uint64_t cookie, const void *data) {
    size_t stored = is_offer ? 0 : (size_t)f->signature; /* of a message to oneself more than a frame's */
    ddl__unexpected *u = ddl__scratch_get(c, sizeof *u + stored);
    if (u == NULL) {
        ddl__log(&c->base, DDL_LOG_WARN, "no memory to keep a message of %zu bytes from rank %d", stored, source);
        return DDL_ERR_NOMEM;
    }
    *u = (ddl__unexpected){.source = source,
                           .tag = (int32_t)f->sequence,
                           .dtype = (ddl_dtype)(f->flags & 0xff),
                           .is_offer = is_offer,
                           .bytes = f->signature,
                           .cookie = cookie};
    u->arrived_ns = u->tag < 0 ? ddl__now_ns() : 0;
    if (stored > 0) {
        memcpy(u->data, data, stored);
    }
    if (g->unexpected_last != NULL) {
        g->unexpected_last->next = u;
    } else {
        g->unexpected_first = u;
    }
    g->unexpected_last = u;
    g->unexpected_bytes += stored;
    c->stats.unexpected_bytes += stored;
    return DDL_OK;
}

static void ddl__unexpected_remove(ddl_group *g, ddl__unexpected *u) {
    ddl__unexpected *last = NULL;
    for (ddl__unexpected **at = &g->unexpected_first; *at != NULL; last = *at, at = &(*at)->next) {
        if (*at == u) {
            *at = u->next;
            g->unexpected_last = g->unexpected_last == u ? last : g->unexpected_last;
            break;
        }
    }
    uint64_t stored = u->is_offer ? 0 : u->bytes;
    g->unexpected_bytes -= stored;
    g->context->stats.unexpected_bytes -= stored;
    ddl__scratch_put(g->context, u);
}

static ddl__unexpected *ddl__unexpected_find(ddl_group *g, int32_t source, int32_t tag) {
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = u->next) {
        if ((source == DDL_ANY_SOURCE || source == u->source) &&
            (tag == u->tag || (tag == DDL_ANY_TAG && u->tag >= 0))) {
            return u;
        }
    }
    return NULL;
}

static void ddl__recv_start(ddl_context *c, ddl_request *r) {
    ddl_group *g = r->group;
    ddl__unexpected *u = ddl__unexpected_find(g, r->peer, r->tag);
    if (u == NULL) {
        if (r->peer >= 0 && c->links[g->ranks[r->peer]].life == DDL__DEAD) {
            ddl__request_fail(r, DDL_ERR_PEER, "receive from rank %d of group \"%s\" (tag %d): %s", r->peer, g->name,
                              r->tag, g->cause);
            return;
        }
        ddl__posted_append(g, r);
        return;
    }
    if (!ddl__recv_fits(r, u->source, u->tag, u->dtype, u->bytes)) {
        return;
    }
    if (u->is_offer) {
        if (!ddl__accept(c, r, u->source, u->cookie)) {
            return;
        }
    } else {
        if (u->bytes > 0) {
            memcpy(r->data, u->data, u->bytes);
        }
        if (u->source != g->rank) {
            ddl__p2p_took(c, g, u->source, u->bytes);
        }
        ddl__recv_done(r);
    }
    ddl__unexpected_remove(g, u);
}

/* >>frames */

/* The peer took that many eager bytes of ours. False: more than we ever sent. */
static bool ddl__credit(ddl_group *g, int32_t peer, uint32_t taken) {
    ddl__toward *flow = &g->flows[peer];
    if (taken > flow->p2p_out) {
        return false;
    }
    flow->p2p_out -= taken;
    return true;
}

static ddl_status ddl__on_p2p(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (f->signature != f->bytes || f->bytes > DDL__P2P_EAGER_BYTES) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t source = g->rank_of[peer];
    if (!ddl__credit(g, source, (uint32_t)(f->sequence >> 32))) {
        return DDL_ERR_CORRUPT;
    }
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, (ddl_dtype)(f->flags & 0xff), f->bytes);
    if (r == NULL) {
        return ddl__keep_unexpected(c, g, source, f, false, 0, payload);
    }
    if (f->bytes > 0) {
        memcpy(r->data, payload, f->bytes);
    }
    ddl__p2p_took(c, g, source, f->bytes);
    ddl__recv_done(r);
    return DDL_OK;
}

/* A message that somebody has asked for, and that does not come whole, goes straight to its place. What is wrong with
 * one is said when it is whole. */
static void *ddl__place_p2p(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    uint32_t credit = (uint32_t)(f->sequence >> 32);
    if (g == NULL || f->signature != f->bytes || f->bytes > DDL__P2P_EAGER_BYTES || f->bytes == 0 ||
        credit > g->flows[g->rank_of[peer]].p2p_out) {
        return NULL;
    }
    int32_t source = g->rank_of[peer];
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, (ddl_dtype)(f->flags & 0xff), f->bytes);
    if (r == NULL) {
        return NULL;
    }
    ddl__credit(g, source, credit);
    r->peer = source;
    r->landing = landing;
    landing->owner = r;
    return r->data;
}

static void ddl__placed_p2p(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    ddl_request *r = landing->owner; /* NULL: abandoned meanwhile */
    ddl_group *g = ddl__frame_group(c, peer, &landing->frame);
    if (g != NULL && status == DDL_OK) {
        ddl__p2p_took(c, g, g->rank_of[peer], landing->frame.bytes);
    }
    if (r != NULL) {
        r->landing = NULL;
        if (status == DDL_OK) {
            ddl__recv_done(r);
        }
    }
}

static ddl_status ddl__on_rts(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader in = ddl__reader_of(payload, f->bytes);
    uint64_t cookie = ddl__get_u64(&in);
    if (in.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t source = g->rank_of[peer];
    if (!ddl__credit(g, source, (uint32_t)(f->sequence >> 32))) {
        return DDL_ERR_CORRUPT;
    }
    ddl_request *r = ddl__posted_take(g, source, (int32_t)f->sequence, (ddl_dtype)(f->flags & 0xff), f->signature);
    if (r == NULL || !ddl__accept(c, r, source, cookie)) {
        return ddl__keep_unexpected(c, g, source, f, true, cookie, NULL);
    }
    return DDL_OK;
}

/* Tells a receiver that no (more) data comes for the offer it accepted. */
static void ddl__give_up(ddl_context *c, int32_t peer, uint32_t group, uint32_t epoch, uint64_t theirs) {
    ddl__frame gone = {.type = DDL__FRAME_DATA, .flags = DDL__DATA_GIVEN_UP, .group = group, .epoch = epoch,
                       .sequence = theirs};
    ddl__tell(c, peer, gone, NULL, 0);
}

static ddl_status ddl__on_cts(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader in = ddl__reader_of(payload, f->bytes);
    uint64_t mine = ddl__get_u64(&in), theirs = ddl__get_u64(&in);
    if (in.bad) {
        return DDL_ERR_CORRUPT;
    }
    ddl_request *r = ddl__request_of(c, mine);
    if (r == NULL) {
        ddl__give_up(c, peer, f->group, f->epoch, theirs);
        return DDL_OK;
    }
    if (r->is_recv || r->matched || r->out.owner != r || ddl__world_rank(r) != peer) {
        return DDL_ERR_CORRUPT;
    }
    r->matched = true;
    r->remote = theirs;
    ddl__send_data(c, r);
    return DDL_OK;
}

/* The receive that a DATA frame belongs to; NULL: it has ended and the data is dropped. */
static ddl_request *ddl__data_request(ddl_context *c, int32_t peer, const ddl__frame *f) {
    ddl_request *r = ddl__request_of(c, f->sequence);
    bool mine = r != NULL && r->is_recv && r->matched && r->peer >= 0 && ddl__world_rank(r) == peer;
    return mine && f->bytes <= r->total - r->moved ? r : NULL;
}

static void ddl__data_moved(ddl_request *r, uint64_t bytes) {
    r->moved += bytes;
    if (r->moved == r->total) {
        ddl__recv_done(r);
    }
}

static ddl_status ddl__on_data(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_request *r = ddl__data_request(c, peer, f);
    if (r == NULL) {
        return DDL_OK;
    }
    if ((f->flags & DDL__DATA_GIVEN_UP) != 0) {
        ddl__request_fail(r, DDL_ERR_CANCELLED,
                          "receive from rank %d of group \"%s\": the sender gave up before all data "
                          "was sent (its own call ended with an error)",
                          r->peer, r->group->name);
        return DDL_OK;
    }
    if (f->bytes > 0) {
        memcpy(r->data + r->moved, payload, f->bytes);
    }
    ddl__data_moved(r, f->bytes);
    return DDL_OK;
}

static void *ddl__place_data(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_request *r = ddl__data_request(c, peer, f);
    if (r == NULL || f->bytes == 0) {
        return NULL;
    }
    landing->owner = r;
    r->landing = landing;
    return r->data + r->moved;
}

static void ddl__placed_data(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)c;
    (void)peer;
    ddl_request *r = landing->owner;
    if (r == NULL) {
        return; /* abandoned meanwhile */
    }
    r->landing = NULL;
    if (status == DDL_OK) {
        ddl__data_moved(r, landing->frame.bytes);
    }
}

/* >>ending early */

/* The rest of what lands in a receive's buffer goes elsewhere. A message that its sender thinks sent is kept: what has
 * come of it is copied, and when it is whole it waits for another receive. */
static void ddl__landing_leave(ddl_context *c, ddl_request *r, ddl__landing *l) {
    r->landing = NULL;
    l->owner = NULL;
    ddl__landing_abandon(c, ddl__world_rank(r), l);
    if (l->frame.type == DDL__FRAME_P2P && l->scratch != NULL) {
        memcpy(l->scratch, r->data, l->frame.bytes);
        l->target = NULL;
        l->frame.sequence = (uint32_t)l->frame.sequence; /* the credit that came with it was taken */
    }
}

static void ddl__p2p_abandon(ddl_context *c, ddl_request *r) {
    if (r->is_recv) {
        ddl__posted_unlink(r->group, r);
        if (r->landing != NULL) {
            ddl__landing_leave(c, r, r->landing);
        }
        return;
    }
    ddl__recall(c, ddl__world_rank(r), &r->out);
    if (r->matched && r->out.done == ddl__send_data_done) {
        ddl__give_up(c, ddl__world_rank(r), r->group->id, r->group->epoch, r->remote);
    }
}

static void ddl__p2p_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    (void)c;
    const char *state = r->is_recv ? (r->matched ? "the data is on its way" : "no such message has come")
                                   : (r->matched ? "the data is on its way" : "the receiver has not asked for it");
    if (r->peer == DDL_ANY_SOURCE) {
        ddl__text_add(text, "receive from any rank of group \"%s\" (tag %d): %s", r->group->name, r->tag, state);
    } else {
        ddl__text_add(text, "%s rank %d of group \"%s\" (tag %d, %llu bytes): %s",
                      r->is_recv ? "receive from" : "send to", r->peer, r->group->name, r->tag,
                      (unsigned long long)r->bytes, state);
    }
}

/* While a member waits for the leader's number: the leader's offer of a group of the same name and other ranks. See
 * coll/groups.h for the tags. */
static ddl__unexpected *ddl__rival_offer(const ddl_group *g, int32_t leader, int32_t tag) {
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = u->next) {
        if (u->source == leader && u->tag < 0 && u->tag != tag && ((u->tag ^ tag) >> DDL__TAG_LIST_BITS) == 0) {
            return u;
        }
    }
    return NULL;
}

static void ddl__p2p_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    if (r->is_recv && r->tag < DDL_ANY_TAG && !r->matched && waited > DDL__RIVAL_NS) {
        const ddl__unexpected *u = ddl__rival_offer(r->group, r->peer, r->tag);
        if (u != NULL && ddl__now_ns() - u->arrived_ns > DDL__RIVAL_NS) { /* no other thread of ours takes it */
            ddl__p2p_abandon(c, r);
            ddl__request_fail(r, DDL_ERR_MISMATCH, "rank %d gave another list of members", r->peer);
            return;
        }
    }
    if (r->peer >= 0 && ddl__is_drained(r->group, r->peer)) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, DDL_ERR_PEER, "%s rank %d of group \"%s\": it has left the job (ddl_finalize)",
                          r->is_recv ? "receive from" : "send to", r->peer, r->group->name);
    } else if (r->peer == DDL_ANY_SOURCE && ddl__is_alone(r->group)) {
        ddl__p2p_abandon(c, r);
        ddl__request_fail(r, DDL_ERR_PEER, "receive from any rank of group \"%s\" (tag %d): %s", r->group->name, r->tag,
                          ddl__why_alone);
    }
}

static int32_t ddl__p2p_expect(ddl_context *c, ddl_request *r) {
    (void)c;
    return r->peer >= 0 ? ddl__world_rank(r) : -1;
}

static const ddl__request_ops ddl__p2p_ops = {ddl__p2p_abandon, ddl__p2p_explain, ddl__p2p_tick, ddl__p2p_expect, NULL};

/* Fails what needs the dead rank. A receive from any rank is told too: the message it waits for may have been that
 * one's; it may be started again. */
static void ddl__p2p_rank_dead(ddl_group *g, int32_t rank) {
    ddl_context *c = g->context;
    ddl__unexpected *next;
    for (ddl__unexpected *u = g->unexpected_first; u != NULL; u = next) {
        next = u->next;
        if (u->is_offer && u->source == rank) { /* its data will not come; messages that are whole can be received */
            ddl__unexpected_remove(g, u);
        }
    }
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (r->state == DDL__REQUEST_ACTIVE && r->group == g && r->ops == &ddl__p2p_ops &&
            (r->peer == rank || (r->peer == DDL_ANY_SOURCE && r->is_recv))) {
            ddl__p2p_abandon(c, r);
            ddl__request_fail(r, DDL_ERR_PEER, "%s rank %d of group \"%s\" (tag %d): %s",
                              r->is_recv ? "receive from" : "send to", rank, g->name, r->tag, g->cause);
        }
    }
}

static void ddl__p2p_group_free(ddl_group *g) {
    while (g->unexpected_first != NULL) {
        ddl__unexpected_remove(g, g->unexpected_first);
    }
}

/* >>p2p/quick */
/* p2p, third part: the short way of a blocking message. Over shared memory a small one takes a tenth of a microsecond;
 * to make and to end a request would be the larger part of it. So what can leave at once leaves without a request, and
 * what has come is taken without one. All else goes the long way, which finds everything as it was. */

/* A view of which the long way would find nothing to say, in one piece. */
static bool ddl__is_plain(const ddl_tensor *t) {
    return t->ndim == 1 && t->device == DDL_HOST && t->data != NULL && ddl__is_contiguous(t) && t->shape[0] > 0 &&
           t->shape[0] <= INT32_MAX && ddl__dtype_bytes(t->dtype) > 0;
}

/* The transport keeps the message: r becomes the request that it belongs to, or ends with the error. */
static void ddl__send_adopt(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_request *r,
                            ddl_status status) {
    ddl__outgoing out = r->out; /* a transport that borrows it refers to it by its address, which stays */
    ddl__request_init(g, &ddl__p2p_ops, r);
    r->out = out;
    r->tensor.dtype = t->dtype;
    r->data = t->data;
    r->bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    r->peer = peer;
    r->tag = tag;
    r->matched = r->unseen = true;
    if (status < 0) {
        ddl__send_failed(r, status);
    }
}

/* Sends a message that fits the receiver's window. False: it is one for the long way. */
static bool ddl__send_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(t) || peer < 0 || peer >= g->size || peer == g->rank || tag < 0 || c->aborted) {
        return false;
    }
    uint64_t bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    if (!ddl__goes_eagerly(g, peer, bytes) || c->links[g->ranks[peer]].life != DDL__ALIVE ||
        ddl__request_take(c, &r) < 0) {
        return false;
    }
    g->flows[peer].p2p_out += (uint32_t)bytes + DDL__FRAME_BYTES;
    ddl__frame f = ddl__envelope(g, DDL__FRAME_P2P, peer, tag, t->dtype, bytes);
    f.bytes = (uint32_t)bytes;
    r->out.done = ddl__send_done;
    r->out.owner = r;
    *out_status = ddl__post(c, g->ranks[peer], &r->out, &f, t->data);
    if (*out_status == DDL_OK) {
        ddl__request_untake(c, r);
        c->stats.ops_started++;
        c->stats.ops_completed++;
        return true;
    }
    ddl__send_adopt(g, t, peer, tag, r, *out_status);
    ddl__wait_requests(c, &r, 1, false);
    *out_status = ddl__request_report(&r, NULL);
    return true;
}

/* Takes a message that has come, if it is one for such a receive. False: it is not, and the long way says why. */
static bool ddl__recv_early(ddl_group *g, const ddl_tensor *t, ddl__unexpected *u, ddl_info *out_info) {
    ddl_context *c = g->context;
    size_t each = ddl__dtype_bytes(t->dtype);
    if (u->is_offer || u->dtype != t->dtype || u->bytes > (uint64_t)t->shape[0] * each) {
        return false;
    }
    if (u->bytes > 0) {
        memcpy(t->data, u->data, u->bytes);
    }
    if (u->source != g->rank) {
        ddl__p2p_took(c, g, u->source, u->bytes);
    }
    if (out_info != NULL) {
        *out_info = (ddl_info){
            .source = u->source, .tag = u->tag, .count = (int64_t)(u->bytes / each), .status = DDL_OK};
    }
    ddl__unexpected_remove(g, u);
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return true;
}

/* Receives what has come, or waits for it. False: it is something for the long way. */
static bool ddl__recv_quick(ddl_group *g, const ddl_tensor *t, int32_t peer, int32_t tag, ddl_info *out_info,
                            ddl_status *out_status) {
    ddl_context *c = g->context;
    ddl_request *r;
    if (!ddl__is_plain(t) || peer < DDL_ANY_SOURCE || peer >= g->size || tag < DDL_ANY_TAG || c->aborted) {
        return false;
    }
    *out_status = DDL_OK;
    ddl__unexpected *u = ddl__unexpected_find(g, peer, tag);
    if (u != NULL) {
        return ddl__recv_early(g, t, u, out_info);
    }
    if ((peer >= 0 && c->links[g->ranks[peer]].life != DDL__ALIVE) || ddl__request_take(c, &r) < 0) {
        return false;
    }
    ddl__request_init(g, &ddl__p2p_ops, r);
    r->is_recv = r->unseen = true;
    r->peer = peer;
    r->tag = tag;
    r->tensor.dtype = t->dtype;
    r->data = t->data;
    r->bytes = (uint64_t)t->shape[0] * ddl__dtype_bytes(t->dtype);
    ddl__posted_append(g, r);
    ddl__wait_requests(c, &r, 1, false);
    if (r->status == DDL_OK && out_info == NULL) {
        ddl__request_release(r);
    } else {
        *out_status = ddl__request_report(&r, out_info);
    }
    return true;
}

/* >>p2p/p2p */
/* p2p, fourth part: the public calls, and checks of what callers pass. */

/* The buffer of a message: the tensor itself, or packed scratch when it is strided. */
static ddl_status ddl__p2p_buffer(ddl_request *r, const ddl_tensor *t) {
    ddl_context *c = r->context;
    r->tensor = *t;
    r->bytes = (uint64_t)ddl_tensor_count(t) * ddl_dtype_bytes(t->dtype);
    r->data = t->data;
    if (r->bytes == 0 || ddl__is_contiguous(t)) {
        return DDL_OK;
    }
    r->packed = ddl__scratch_get(c, r->bytes);
    if (r->packed == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to pack a strided tensor of %llu bytes",
                          (unsigned long long)r->bytes);
    }
    r->data = r->packed;
    if (!r->is_recv) {
        ddl__pack(t, r->data, false);
    }
    return DDL_OK;
}

static ddl_status ddl__p2p_check(ddl_group *g, const ddl_transfer *t, const char *what) {
    ddl_context *c = g->context;
    bool any = !t->is_send && t->peer == DDL_ANY_SOURCE;
    if (t->peer != DDL_NO_RANK && !any && (t->peer < 0 || t->peer >= g->size)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: rank %d is not in group \"%s\", whose ranks are 0 to %d", what, t->peer,
                          g->name, g->size - 1);
    }
    if (t->tag < 0 && !(t->tag == DDL_ANY_TAG && !t->is_send)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the tag is %d; tags are 0 and up%s", what, t->tag,
                          t->is_send ? "" : ", or DDL_ANY_TAG to receive");
    }
    DDL__TRY(ddl__tensor_check(c, &t->tensor, what, "tensor"));
    return t->is_send ? DDL_OK : ddl__tensor_check_output(c, &t->tensor, what, "tensor");
}

/* What ddl_send_recv receives must not change what it sends meanwhile. A strided tensor is sent from a copy. */
static ddl_status ddl__p2p_check_apart(ddl_group *g, const ddl_transfer *recv, const ddl_transfer *send,
                                       const char *what) {
    bool moves = recv->peer != DDL_NO_RANK && send->peer != DDL_NO_RANK;
    if (moves && ddl__is_contiguous(&send->tensor) && ddl__tensor_touches(&recv->tensor, &send->tensor)) {
        return ddl__error(g->context, DDL_ERR_ARG, "%s: `send` and `recv` overlap; they must be apart", what);
    }
    return DDL_OK;
}

/* A message to this rank itself meets its receive at once, or waits as a copy. */
static void ddl__send_self(ddl_context *c, ddl_request *r) {
    ddl_group *g = r->group;
    ddl__frame f = ddl__p2p_frame(r, DDL__FRAME_P2P);
    ddl_request *to = ddl__posted_take(g, g->rank, r->tag, r->tensor.dtype, r->bytes);
    if (to != NULL) {
        if (r->bytes > 0) {
            memmove(to->data, r->data, r->bytes);
        }
        ddl__recv_done(to);
    } else if (ddl__keep_unexpected(c, g, g->rank, &f, false, 0, r->data) < 0) {
        ddl__request_fail(r, DDL_ERR_NOMEM,
                          "send of %llu bytes to this rank itself: no memory to keep them until they are "
                          "received; start the receive first",
                          (unsigned long long)r->bytes);
        return;
    }
    ddl__request_done(r, DDL_OK);
}

/* Makes a request of a transfer that was checked; it is not started yet. */
static ddl_status ddl__p2p_make(ddl_group *g, const ddl_transfer *t, ddl_request **out) {
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__p2p_ops, &r));
    r->is_recv = !t->is_send;
    r->peer = t->peer;
    r->tag = t->tag;
    ddl_status status = ddl__p2p_buffer(r, &t->tensor);
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    *out = r;
    return DDL_OK;
}

static void ddl__p2p_start(ddl_context *c, ddl_request *r) {
    if (r->peer == DDL_NO_RANK) {
        r->info.count = 0;
        ddl__request_done(r, DDL_OK);
    } else if (c->aborted) {
        ddl__request_fail(r, DDL_ERR_ABORTED, "%s", c->abort_text);
    } else if (c->finalized) { /* a call of several messages (making a group) is not to wait for its next one */
        ddl__request_fail(r, DDL_ERR_STATE, "the context was finalized while the operation was running");
    } else if (r->is_recv) {
        ddl__recv_start(c, r);
    } else if (r->peer == r->group->rank) {
        ddl__send_self(c, r);
    } else {
        ddl__send_start(c, r);
    }
}

/* Starts transfers: all, or none. */
static ddl_status ddl__p2p_begin(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                                 ddl_request **out_requests) {
    ddl_context *c = g->context;
    for (int32_t i = 0; i < count; i++) {
        DDL__TRY(ddl__p2p_check(g, &transfers[i], what));
    }
    if (count == 2 && !transfers[0].is_send && transfers[1].is_send) { /* a batch that is one is checked too */
        DDL__TRY(ddl__p2p_check_apart(g, &transfers[0], &transfers[1], what));
    }
    int32_t made = 0;
    ddl_status status = DDL_OK;
    while (made < count && status == DDL_OK) {
        status = ddl__p2p_make(g, &transfers[made], &out_requests[made]);
        made += status == DDL_OK;
    }
    if (status < 0) {
        while (made > 0) {
            ddl__request_release(out_requests[--made]);
            out_requests[made] = NULL;
        }
        return status;
    }
    for (int32_t i = 0; i < count; i++) {
        ddl__p2p_start(c, out_requests[i]);
    }
    return DDL_OK;
}

/* Begins transfers and, for a blocking call (out_requests NULL), waits for them. The lock is held. */
static ddl_status ddl__p2p_run(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                               ddl_request **out_requests, ddl_info *out_infos) {
    ddl_context *c = g->context;
    ddl_request *own[2] = {NULL, NULL};
    ddl_status status = ddl__p2p_begin(g, transfers, count, what, out_requests != NULL ? out_requests : own);
    if (status == DDL_OK && out_requests == NULL) {
        for (int32_t i = 0; i < count; i++) {
            own[i]->unseen = true;
        }
        ddl__wait_requests(c, own, count, false);
        status = ddl__report_all(c, own, count, out_infos);
    }
    return status;
}

static ddl_status ddl__p2p_call(ddl_group *g, const ddl_transfer *transfers, int32_t count, const char *what,
                                ddl_request **out_requests, ddl_info *out_infos) {
    for (int32_t i = 0; out_requests != NULL && i < count; i++) {
        out_requests[i] = NULL;
    }
    DDL__TRY(ddl__enter_group(g, what));
    ddl_status status = ddl__p2p_run(g, transfers, count, what, out_requests, out_infos);
    ddl__unlock(g->context);
    return status;
}

/* >>public */

DDL_API ddl_status ddl_send(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag) {
    ddl_status status;
    DDL__TRY(ddl__enter_group(group, "ddl_send"));
    if (!ddl__send_quick(group, &tensor, peer, tag, &status)) {
        ddl_transfer t = {1, tensor, peer, tag};
        status = ddl__p2p_run(group, &t, 1, "ddl_send", NULL, NULL);
    }
    ddl__unlock(group->context);
    return status;
}

DDL_API ddl_status ddl_recv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag, ddl_info *out_info) {
    ddl_status status;
    DDL__TRY(ddl__enter_group(group, "ddl_recv"));
    if (!ddl__recv_quick(group, &tensor, peer, tag, out_info, &status)) {
        ddl_transfer t = {0, tensor, peer, tag};
        status = ddl__p2p_run(group, &t, 1, "ddl_recv", NULL, out_info);
    }
    ddl__unlock(group->context);
    return status;
}

DDL_API ddl_status ddl_isend(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag,
                             ddl_request **out_request) {
    ddl_transfer t = {1, tensor, peer, tag};
    return out_request == NULL ? ddl__refuse_group(group, "ddl_isend", "out_request")
                               : ddl__p2p_call(group, &t, 1, "ddl_isend", out_request, NULL);
}

DDL_API ddl_status ddl_irecv(ddl_group *group, ddl_tensor tensor, int32_t peer, int32_t tag,
                             ddl_request **out_request) {
    ddl_transfer t = {0, tensor, peer, tag};
    return out_request == NULL ? ddl__refuse_group(group, "ddl_irecv", "out_request")
                               : ddl__p2p_call(group, &t, 1, "ddl_irecv", out_request, NULL);
}

DDL_API ddl_status ddl_send_recv(ddl_group *group, ddl_tensor send, int32_t dest, int32_t send_tag, ddl_tensor recv,
                                 int32_t source, int32_t recv_tag, ddl_info *out_info) {
    ddl_transfer both[2] = {{0, recv, source, recv_tag}, {1, send, dest, send_tag}};
    ddl_info infos[2];
    ddl_status status = ddl__p2p_call(group, both, 2, "ddl_send_recv", NULL, infos);
    if (out_info != NULL && status == DDL_OK) {
        *out_info = infos[0];
    }
    return status;
}

DDL_API ddl_status ddl_batch(ddl_group *group, const ddl_transfer *transfers, int32_t count,
                             ddl_request **out_requests) {
    if (count < 0 || (count > 0 && (transfers == NULL || out_requests == NULL))) {
        return ddl__refuse_group(group, "ddl_batch", count < 0 ? "count is negative, or an array" : "an array");
    }
    ddl_request *none = NULL;
    return ddl__p2p_call(group, transfers, count, "ddl_batch", count > 0 ? out_requests : &none, NULL);
}

DDL_API ddl_status ddl_cancel(ddl_request *request) {
    ddl_request *list[1] = {request};
    ddl_context *c;
    if (request == NULL) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter_requests(list, 1, "ddl_cancel", &c));
    ddl_status status = DDL_OK;
    if (!c->polling) {
        ddl__poll(c, -1); /* what has come must not be passed over because nobody has looked */
    }
    if (request->ops != &ddl__p2p_ops || !request->is_recv) {
        status = ddl__error(c, DDL_ERR_ARG, "ddl_cancel: only a receive can be cancelled");
    } else if (request->state != DDL__REQUEST_ACTIVE || request->matched) {
        status = ddl__error(c, DDL_ERR_STATE, "ddl_cancel: too late, a message has arrived for this receive");
    } else {
        ddl__p2p_abandon(c, request);
        ddl__request_fail(request, DDL_ERR_CANCELLED, "the receive was cancelled");
    }
    ddl__unlock(c);
    return status;
}

/* >>probe */

typedef struct ddl__probing {
    ddl_group *group;
    int32_t peer, tag;
    int32_t deaths; /* that a probe of any rank has reported before this one began */
    bool alone, lost;
} ddl__probing;

/* From any rank: each death is told once, as to a receive. The message waited for may have been the dead one's. */
static bool ddl__probe_done(ddl_context *c, void *arg) {
    ddl__probing *p = arg;
    p->lost = p->peer >= 0 ? ddl__is_gone(p->group, p->peer) : p->alone || p->group->deaths > p->deaths;
    return p->lost || c->aborted || c->finalized || ddl__unexpected_find(p->group, p->peer, p->tag) != NULL;
}

static void ddl__probe_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)c;
    (void)now;
    ddl__probing *p = arg;
    p->alone = p->peer < 0 && ddl__is_alone(p->group);
}

static ddl_status ddl__probe_lost(ddl__probing *p, const char *what) {
    ddl_group *g = p->group;
    if (p->peer >= 0) {
        return ddl__error(g->context, DDL_ERR_PEER, "%s: rank %d is gone", what, p->peer);
    }
    g->deaths_probed = g->deaths;
    return ddl__error(g->context, DDL_ERR_PEER, "%s from any rank of group \"%s\": %s", what, g->name,
                      p->alone ? ddl__why_alone : g->cause);
}

static ddl_status ddl__probe(ddl_group *g, int32_t peer, int32_t tag, bool block, const char *what, ddl_info *out) {
    DDL__TRY(ddl__enter_group(g, what));
    ddl_context *c = g->context;
    ddl_transfer t = {0, ddl_tensor_1d(NULL, DDL_U8, 0), peer, tag};
    ddl_status status = peer == DDL_NO_RANK
                            ? ddl__error(c, DDL_ERR_ARG, "%s: DDL_NO_RANK sends nothing to look for", what)
                            : ddl__p2p_check(g, &t, what);
    ddl__probing probing = {.group = g, .peer = peer, .tag = tag, .deaths = g->deaths_probed};
    ddl__wait w = {ddl__probe_done, ddl__probe_tick, NULL, &probing, ddl__deadline(ddl__now_ns(), g->timeout_ms)};
    g->outstanding++; /* the group cannot be freed meanwhile */
    ddl__probe_tick(c, &probing, 0);
    if (status == DDL_OK && !ddl__probe_done(c, &probing)) {
        if (block && !ddl__wait_for(c, &w)) {
            status = ddl__error(c, DDL_ERR_TIMEOUT, "%s: no message from rank %d (tag %d) came before the deadline",
                                what, peer, tag);
        } else if (!block && !c->polling) {
            ddl__poll(c, peer >= 0 ? g->ranks[peer] : -1);
            ddl__look(c, ddl__now_ns());
        }
    }
    ddl__unexpected *u = status == DDL_OK ? ddl__unexpected_find(g, peer, tag) : NULL;
    if (u != NULL && out != NULL) {
        *out = (ddl_info){.source = u->source, .tag = u->tag, .count = (int64_t)u->bytes, .status = DDL_OK};
    }
    if (status == DDL_OK && u == NULL) {
        status = c->aborted     ? ddl__error(c, DDL_ERR_ABORTED, "%s: %s", what, c->abort_text)
                 : c->finalized ? ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized meanwhile", what)
                 : ddl__probe_done(c, &probing) ? ddl__probe_lost(&probing, what)
                                                : DDL_IN_PROGRESS;
    }
    g->outstanding--;
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_probe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info) {
    return ddl__probe(group, peer, tag, true, "ddl_probe", out_info);
}

DDL_API ddl_status ddl_iprobe(ddl_group *group, int32_t peer, int32_t tag, ddl_info *out_info) {
    return ddl__probe(group, peer, tag, false, "ddl_iprobe", out_info);
}

/* >>engine/reduction */
/* engine: what reduces in a collective: one of our kernels, or a program's own function, for two operands or for as
 * many as there are ranks. Operands come in the order of ranks, and the brackets open from the left. */

/* A user's op, or a scaled sum. */
typedef struct ddl__user_op {
    struct ddl__user_op *next;
    ddl_op id;
    bool commutative, freed;
    int32_t users; /* running operations and persistent requests: a freed op goes with the last */
    ddl_op_fn fn;  /* NULL: scaled sum */
    void *user;
    double factor;
} ddl__user_op;

/* Ids follow the order of creation alone, for they are compared between ranks: which operations still run, and hold an
 * op that was freed, differs from rank to rank. */
typedef struct ddl__ops {
    ddl__user_op *first;
    int32_t count;    /* that are not freed */
    uint32_t created;
} ddl__ops;

static void ddl__user_op_release(ddl_context *c, ddl__user_op *op) {
    for (ddl__user_op **at = &c->ops->first; *at != NULL; at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            ddl__free(&c->base, op);
            return;
        }
    }
}

/* One user less. */
static void ddl__user_op_drop(ddl_context *c, ddl__user_op *op) {
    if (--op->users == 0 && op->freed) {
        ddl__user_op_release(c, op);
    }
}

typedef struct ddl__reduction {
    ddl__reduce_fn kernel;
    const ddl__user_op *user; /* NULL, or a scaled sum: the kernel does it */
    ddl_dtype dtype;
    uint32_t element_shift; /* log2 of the bytes of an element */
} ddl__reduction;

static ddl__reduction ddl__reduction_of(ddl_op op, ddl_dtype dtype, const ddl__user_op *user) {
    ddl__reduction r = {.kernel = ddl__reduce_kernel(dtype, user != NULL ? DDL_SUM : op),
                        .user = user != NULL && user->fn != NULL ? user : NULL,
                        .dtype = dtype};
    while ((size_t)1 << r.element_shift < ddl_dtype_bytes(dtype)) {
        r.element_shift++;
    }
    return r;
}

/* dst = a op b, a from the lower ranks; dst may be either. */
static void ddl__reduce_pair(const ddl__reduction *r, void *dst, const void *a, const void *b, uint64_t bytes) {
    size_t count = bytes >> r->element_shift;
    if (count == 0) {
        return; /* nothing to reduce is none of a program's function's business */
    }
    if (r->user != NULL) {
        r->user->fn(dst, a, b, (int64_t)count, r->dtype, r->user->user);
    } else {
        r->kernel(dst, a, b, count);
    }
}

/* Our kernels read bytes at any address; a user's function has typed pointers, but a payload begins where the stream of
 * frames puts it. */
static void ddl__reduce_aligned(const ddl__reduction *r, char *dst, const char *own, const char *theirs, uint64_t bytes,
                                bool theirs_first) {
    char piece[4096] __attribute__((aligned(64))); /* a multiple of every element */
    for (uint64_t at = 0; at < bytes; at += sizeof piece) {
        uint64_t n = DDL__MIN(bytes - at, (uint64_t)sizeof piece);
        memcpy(piece, theirs + at, n);
        ddl__reduce_pair(r, dst + at, theirs_first ? piece : own + at, theirs_first ? own + at : piece, n);
    }
}

/* dst = (srcs[0] op srcs[1]) op ...; dst may be any of them, so what is between stays in a piece of our own. The piece
 * is small: while one source is added the next ones are fetched, which larger pieces lose beyond the caches. */
static void ddl__reduce_many(const ddl__reduction *r, char *dst, const char *const *srcs, int32_t count,
                             uint64_t bytes) {
    char piece[2048] __attribute__((aligned(64)));
    if (count <= 2) {
        ddl__reduce_pair(r, dst, srcs[0], srcs[count - 1], count == 2 ? bytes : 0);
        if (count == 1 && bytes > 0) {
            memmove(dst, srcs[0], (size_t)bytes);
        }
        return;
    }
    for (uint64_t at = 0; at < bytes; at += sizeof piece) {
        uint64_t n = DDL__MIN(bytes - at, (uint64_t)sizeof piece);
        ddl__reduce_pair(r, piece, srcs[0] + at, srcs[1] + at, n);
        for (int32_t i = 2; i < count - 1; i++) {
            ddl__reduce_pair(r, piece, piece, srcs[i] + at, n);
        }
        ddl__reduce_pair(r, dst + at, piece, srcs[count - 1] + at, n);
    }
}

/* >>engine/op */
/* engine, first part: a collective that runs, and the plans that are kept for the next time.
 * It must not know what a collective means: only steps, memory and messages. */

enum { DDL__CACHED_MAX = 64 };

/* A call after its arguments were checked: what a plan is made from, and what the sentence of an error says. */
/* What a program's own op is: two that have the same number on two ranks must be alike in this too. */
typedef enum ddl__nature { DDL__OF_OURS, DDL__SCALED_SUM, DDL__FUNCTION, DDL__FUNCTION_IN_ORDER } ddl__nature;

typedef struct ddl__call {
    ddl_kind kind;
    ddl_op op;
    ddl_dtype dtype;
    int32_t root;
    int64_t count;
    ddl_tensor in, out;
    bool in_place, commutative;
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets; /* never NULL in v-forms */
    int64_t in_bytes, out_bytes;                                 /* of the packed tensors of this rank */
    int32_t tensors; /* of all_reduce_many, whose part this is; 0: a call of its own */
    const ddl_tensor *list; /* they; NULL in a record */
    uint8_t nature;  /* ddl__nature */
    uint64_t detail; /* hash of what count does not say: lengths of a v-form, the tensors of all_reduce_many */
    uint64_t call_hash, signature; /* see ddl__flight */
} ddl__call;

typedef struct ddl__step_state {
    ddl__outgoing out;
    struct ddl__op *op;
    struct ddl__step_state *held_next;
    uint32_t waits;
    bool ready, arrived, finished, in_transport;
    uint64_t moved;       /* bytes received, or given to the transport */
    unsigned char *early; /* bytes that came before the step was ready */
    ddl__landing *landing;
} ddl__step_state;

typedef struct ddl__op {
    struct ddl__op *next; /* of the group's running ones */
    ddl_group *group;
    ddl_request *request;
    struct ddl__cached *cached;
    ddl__call call;
    uint32_t sequence;
    uint32_t left; /* steps that have not finished */
    bool running;  /* inside ddl__op_run: newly ready steps only queue up */
    char *base[3]; /* of IN, OUT, TMP */
    void *packed_in, *packed_out, *tmp;
    ddl__reduction reduction;
    ddl__user_op *user;
    ddl__step_state *steps;
    uint32_t *ready; /* a queue of step numbers */
    uint32_t ready_first, ready_count, cursor;
    uint64_t asked_ns;
    struct ddl__answer *answers; /* by group rank, once somebody was asked */
    struct ddl__op *native_next; /* of the context's natives */
    void *native;              /* what a transport runs for the step native_step ... */
    ddl_status native_refused; /* ... NULL: it could not begin, and why */
    uint32_t native_step;
    int32_t native_waits; /* a rank whose part is missing; -1: not known */
    uint32_t natives_left; /* native steps that have not begun */
    uint32_t native_parked; /* one that is ready, before its turn; DDL__NO_STEP: none */
    bool is_native; /* on that list */
} ddl__op;

typedef struct ddl__cached {
    struct ddl__cached *next; /* most recently used first */
    ddl_kind kind;
    int32_t element_bytes, root, pins; /* pins: running ops and persistent requests */
    int32_t held, spares;              /* persistent requests, for each of which an op is kept */
    int64_t count;
    bool in_place, commutative;
    uint32_t settings_version;
    int64_t *arrays; /* copies of the v-forms' arrays, in the order of ddl__call */
    int32_t array_count;
    ddl__plan plan;
    uint32_t *recvs; /* receiving steps, sorted by (peer, slot) */
    uint32_t recv_count, native_count;
    double estimate_s;
    uint64_t algorithm_hash;
    ddl__op *spare; /* ops with all their arrays, for the next runs */
} ddl__cached;

/* A frame that came before this rank called its collective. */
typedef struct ddl__early {
    struct ddl__early *next;
    int32_t source;
    ddl__frame frame;
    unsigned char data[];
} ddl__early;

/* Elements of a call; of a v-form those of all ranks together. */
static int64_t ddl__call_elements(const ddl_group *g, const ddl__call *call) {
    int64_t total = call->count;
    for (int32_t i = 0; i < g->size && call->counts != NULL; i++) {
        total += call->counts[i];
    }
    return total;
}

/* "as 3+4+3": what the ranks have, as far as it fits, and a digest of it all. */
static void ddl__describe_counts(const ddl_group *g, const ddl__call *call, ddl__text *text) {
    for (int32_t i = 0; i < DDL__MIN(g->size, 8) && call->counts != NULL; i++) {
        ddl__text_add(text, "%s%lld", i > 0 ? "+" : " as ", (long long)call->counts[i]);
    }
    ddl__text_add(text, "%s", call->counts != NULL && g->size > 8 ? "+..." : "");
    if (call->detail != 0) {
        ddl__text_add(text, " (#%08x)", (unsigned)call->detail);
    }
}

/* The tensors of all_reduce_many, as far as it fits, and a digest of all. */
static void ddl__describe_list(const ddl__call *call, ddl__text *text) {
    ddl__text_add(text, "%d tensors", call->tensors);
    for (int32_t i = 0; i < DDL__MIN(call->tensors, 6) && call->list != NULL; i++) {
        ddl__text_add(text, "%s%lld x %s", i > 0 ? " + " : ": ", (long long)ddl_tensor_count(&call->list[i]),
                      ddl_dtype_name(call->list[i].dtype));
    }
    ddl__text_add(text, "%s (#%08x)", call->list != NULL && call->tensors > 6 ? " + ..." : "", (unsigned)call->detail);
}

static void ddl__describe_call(const ddl_group *g, const ddl__call *call, const char *algorithm, ddl__text *text) {
    static const char *const natures[] = {"", "a scaled sum", "a function", "a function, not commutative"};
    ddl__text_add(text, "%s%s(", ddl__kind_name(call->kind), call->tensors > 0 ? "_many" : "");
    if (call->tensors > 0) {
        ddl__describe_list(call, text);
    } else if (call->kind != DDL_BARRIER) {
        ddl__text_add(text, "%lld x %s", (long long)ddl__call_elements(g, call), ddl_dtype_name(call->dtype));
    }
    if (ddl__kind_is_v(call->kind)) {
        ddl__describe_counts(g, call, text);
    }
    if (call->op >= 256) {
        ddl__text_add(text, ", op %d, %s", call->op, natures[call->nature]);
    } else if (call->op != DDL_OP_NONE) {
        ddl__text_add(text, ", %s", ddl__op_name(call->op));
    }
    ddl_kind base = ddl__kind_base(call->kind);
    if (base == DDL_BROADCAST || base == DDL_REDUCE || base == DDL_GATHER || base == DDL_SCATTER) {
        ddl__text_add(text, ", root %d", call->root);
    }
    ddl__text_add(text, ") by %s", algorithm != NULL ? algorithm : "?");
}

static const int64_t *ddl__call_array(const ddl__call *call, int32_t which) {
    const int64_t *arrays[4] = {call->counts, call->offsets, call->recv_counts, call->recv_offsets};
    return arrays[which];
}

static int32_t ddl__call_arrays(const ddl__call *call) {
    return call->counts == NULL ? 0 : call->recv_counts != NULL ? 4 : 2;
}

/* A sum of n values of f16 near the largest does not fit in f16, though their average does: inputs are scaled down
 * before the sum. By a power of two, which changes no digit of a value above n times the smallest normal one. */
static bool ddl__averages_scaled(const ddl_group *g, const ddl__call *call) {
    return call->op == DDL_AVG && call->dtype == DDL_F16 && g->size > 1;
}

/* The largest power of two that is not above 1 / n. */
static double ddl__average_scale(int32_t n) {
    double scale = 1;
    while (n * scale > 1) {
        scale /= 2;
    }
    return scale;
}

/* >>memory of an op */

static void ddl__op_free(ddl_context *c, ddl__op *op) {
    if (op != NULL) {
        ddl__free(&c->base, op->steps);
        ddl__free(&c->base, op->ready);
        ddl__free(&c->base, op->tmp);
        ddl__free(&c->base, op->answers);
        ddl__free(&c->base, op);
    }
}

/* Keeps an op for the next run: one, or as many as there are persistent requests that may run at once. */
static void ddl__op_put(ddl_context *c, ddl__cached *cached, ddl__op *op) {
    if (cached->spares < DDL__MAX(cached->held, 1)) {
        op->next = cached->spare;
        cached->spare = op;
        cached->spares++;
    } else {
        ddl__op_free(c, op);
    }
}

static ddl__op *ddl__op_make(ddl_context *c, const ddl__cached *cached) {
    size_t steps = DDL__MAX(cached->plan.step_count, 1u);
    ddl__op *op = ddl__alloc(&c->base, sizeof *op);
    if (op == NULL) {
        return NULL;
    }
    op->steps = ddl__alloc_array(&c->base, steps, sizeof *op->steps);
    op->ready = ddl__alloc_array(&c->base, steps, sizeof *op->ready);
    op->tmp = ddl__alloc(&c->base, (size_t)cached->plan.tmp_bytes);
    if (op->steps == NULL || op->ready == NULL || op->tmp == NULL) {
        ddl__op_free(c, op);
        return NULL;
    }
    return op;
}

static ddl__op *ddl__op_new(ddl_context *c, ddl__cached *cached) {
    ddl__op *op = cached->spare;
    if (op == NULL) {
        return ddl__op_make(c, cached);
    }
    cached->spare = op->next;
    cached->spares--;
    return op;
}

/* >>cache */

static void ddl__cached_free(ddl_context *c, ddl__cached *cached) {
    while (cached->spare != NULL) {
        ddl__op_free(c, ddl__op_new(c, cached));
    }
    ddl__plan_free(&c->base, &cached->plan);
    ddl__free(&c->base, cached->arrays);
    ddl__free(&c->base, cached->recvs);
    ddl__free(&c->base, cached);
}

static bool ddl__cached_fits(const ddl__cached *e, const ddl_group *g, const ddl__call *call) {
    if (e->kind != call->kind || e->count != call->count || e->root != call->root || e->in_place != call->in_place ||
        e->commutative != call->commutative || e->element_bytes != (int32_t)ddl_dtype_bytes(call->dtype) ||
        e->settings_version != g->settings_version || e->array_count != ddl__call_arrays(call)) {
        return false;
    }
    for (int32_t i = 0; i < e->array_count; i++) {
        size_t bytes = (size_t)g->size * sizeof(int64_t);
        if (memcmp(e->arrays + (size_t)i * (size_t)g->size, ddl__call_array(call, i), bytes) != 0) {
            return false;
        }
    }
    return true;
}

static uint64_t ddl__recv_key(const ddl__step *s) { return (uint64_t)(uint32_t)s->peer << 32 | s->slot; }

static bool ddl__is_recv(const ddl__step *s) { return s->kind == DDL__RECV || s->kind == DDL__RECV_REDUCE; }

/* Insertion by halving: plans write their receives almost in order. */
static ddl_status ddl__cached_index(ddl_context *c, ddl__cached *e) {
    const ddl__plan *plan = &e->plan;
    e->recvs = ddl__alloc_array(&c->base, DDL__MAX(plan->step_count, 1u), sizeof *e->recvs);
    if (e->recvs == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < plan->step_count; i++) {
        e->native_count += plan->steps[i].kind == DDL__NATIVE;
        if (!ddl__is_recv(&plan->steps[i])) {
            continue;
        }
        uint64_t key = ddl__recv_key(&plan->steps[i]);
        uint32_t low = 0, high = e->recv_count;
        if (high > 0 && ddl__recv_key(&plan->steps[e->recvs[high - 1]]) < key) {
            low = high;
        }
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            if (ddl__recv_key(&plan->steps[e->recvs[middle]]) < key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        memmove(&e->recvs[low + 1], &e->recvs[low], (e->recv_count - low) * sizeof *e->recvs);
        e->recvs[low] = i;
        e->recv_count++;
    }
    return DDL_OK;
}

/* Copies the v-forms' arrays into the entry: the plan's args point at them while it is written. */
static ddl_status ddl__cached_copy_arrays(ddl_context *c, const ddl_group *g, const ddl__call *call, ddl__cached *e) {
    e->array_count = ddl__call_arrays(call);
    if (e->array_count == 0) {
        return DDL_OK;
    }
    e->arrays = ddl__alloc_array(&c->base, (size_t)e->array_count * (size_t)g->size, sizeof(int64_t));
    if (e->arrays == NULL) {
        return DDL_ERR_NOMEM;
    }
    for (int32_t i = 0; i < e->array_count; i++) {
        memcpy(e->arrays + (size_t)i * (size_t)g->size, ddl__call_array(call, i), (size_t)g->size * sizeof(int64_t));
    }
    return DDL_OK;
}

/* How long the group's transport takes for a call by itself; 0: it does not serve it. */
static double ddl__native_seconds(const ddl_group *g, const ddl__call *call) {
    const ddl__native *n = &g->native;
    if (n->set == NULL || ddl__kind_is_v(call->kind)) {
        return 0;
    }
    uint64_t bytes = (uint64_t)call->count * ddl_dtype_bytes(call->dtype);
    return (double)n->table->native_cost_ns(n->self, n->set, (int32_t)call->kind, bytes) * 1e-9;
}

static ddl__plan_args ddl__call_args(const ddl_group *g, const ddl__call *call) {
    return (ddl__plan_args){.kind = call->kind,
                            .size = g->size,
                            .rank = g->rank,
                            .root = call->root,
                            .element_bytes = (int32_t)ddl_dtype_bytes(call->dtype),
                            .count = call->count,
                            .in_place = call->in_place,
                            .commutative = call->commutative,
                            .counts = call->counts,
                            .offsets = call->offsets,
                            .recv_counts = call->recv_counts,
                            .recv_offsets = call->recv_offsets,
                            .host_of = g->host_of,
                            .native_s = ddl__native_seconds(g, call)};
}

static void ddl__cache_trim(ddl_context *c, ddl_group *g) {
    int32_t count = 0;
    for (ddl__cached **at = &g->cache; *at != NULL;) {
        ddl__cached *e = *at;
        bool stale = e->settings_version != g->settings_version;
        if (e->pins == 0 && (stale || ++count > DDL__CACHED_MAX)) {
            *at = e->next;
            ddl__cached_free(c, e);
        } else {
            at = &e->next;
        }
    }
}

static ddl_status ddl__cached_make(ddl_context *c, ddl_group *g, const ddl__call *call, ddl__cached **out) {
    ddl__cached *e = ddl__alloc(&c->base, sizeof *e);
    if (e == NULL) {
        return DDL_ERR_NOMEM;
    }
    e->kind = call->kind;
    e->count = call->count;
    e->root = call->root;
    e->in_place = call->in_place;
    e->commutative = call->commutative;
    e->element_bytes = (int32_t)ddl_dtype_bytes(call->dtype);
    e->settings_version = g->settings_version;
    ddl__plan_args args = ddl__call_args(g, call);
    ddl_status status = ddl__cached_copy_arrays(c, g, call, e);
    if (status == DDL_OK) {
        ddl__choice choice = ddl__tune_choose(&g->tuning, &args);
        args.chunk_bytes = choice.chunk_bytes;
        args.fence = choice.fence;
        e->estimate_s = choice.seconds;
        status = ddl__plan_make(&c->base, choice.algo, &args, &e->plan);
    }
    if (status == DDL_OK) {
        status = ddl__cached_index(c, e);
    }
    if (status < 0) {
        ddl__cached_free(c, e);
        return status;
    }
    const char *name = e->plan.algorithm;
    e->algorithm_hash = ddl__mix_bytes(e->plan.fenced, name, strlen(name));
    e->next = g->cache;
    g->cache = e;
    *out = e;
    return DDL_OK;
}

/* The plan for a call, from the cache or new. Errors: DDL_ERR_NOMEM, with nothing changed. */
static ddl_status ddl__cached_get(ddl_group *g, const ddl__call *call, ddl__cached **out) {
    ddl_context *c = g->context;
    for (ddl__cached **at = &g->cache; *at != NULL; at = &(*at)->next) {
        ddl__cached *e = *at;
        if (ddl__cached_fits(e, g, call)) {
            *at = e->next;
            e->next = g->cache;
            g->cache = e;
            *out = e;
            return DDL_OK;
        }
    }
    ddl__cache_trim(c, g);
    ddl_status status = ddl__cached_make(c, g, call, out);
    return status == DDL_ERR_NOMEM ? ddl__error(c, status, "no memory to plan an operation on group \"%s\"", g->name)
                                   : status;
}

/* >>engine/native */
/* engine: collectives that a transport runs by itself, by load and store, for the ranks of one host (plugin.h,
 * native_*). In a plan such a collective is one step. The ranks of a group agree on whether they have it when the group
 * is made, because all must choose alike. */

static void ddl__step_finish(ddl__op *op, uint32_t i);
static void ddl__op_run(ddl_context *c, ddl__op *op);
static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence);

/* >>set */

/* The ranks of a group that are on this host, in group order, as world ranks. Returns how many; *out_rank: which of
 * them is this one. */
static int32_t ddl__native_ranks(const ddl_group *g, int32_t *out, int32_t *out_rank) {
    int32_t count = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (g->host_of[i] == g->host_of[g->rank]) {
            *out_rank = i == g->rank ? count : *out_rank;
            out[count++] = g->ranks[i];
        }
    }
    return count;
}

/* The endpoint through which this rank reaches all of them, if it can run collectives; else NULL. */
static ddl__endpoint *ddl__native_endpoint(const ddl_context *c, const int32_t *ranks, int32_t count) {
    ddl__endpoint *all = NULL;
    for (int32_t i = 0; i < count; i++) {
        ddl__endpoint *e = c->links[ranks[i]].endpoint;
        if (ranks[i] == c->rank) {
            continue;
        }
        if (e == NULL || (all != NULL && e != all)) {
            return NULL;
        }
        all = e;
    }
    return all != NULL && DDL_HAS(all->table, native_open) ? all : NULL;
}

/* Opens this rank's part. False: plans are used; that all ranks do the same is for the caller to see to. */
static bool ddl__native_open(ddl_group *g) {
    ddl_context *c = g->context;
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)g->size, sizeof *ranks);
    int32_t rank = 0, count = ranks != NULL ? ddl__native_ranks(g, ranks, &rank) : 0;
    ddl__endpoint *e = ddl__native_endpoint(c, ranks, count);
    uint64_t id = (uint64_t)g->epoch << 32 | g->id;
    void *set = NULL;
    if (e != NULL && e->table->native_open(e->self, id, ranks, count, rank, &set) == DDL_OK) {
        g->native = (ddl__native){.table = e->table, .self = e->self, .set = set};
        g->settings_version++;
    }
    ddl__free(&c->base, ranks);
    return set != NULL;
}

static void ddl__native_close(ddl_group *g) {
    if (g->native.set != NULL) {
        g->native.table->native_close(g->native.self, g->native.set);
        g->native.set = NULL;
        g->settings_version++;
    }
}

/* >>operation */

/* As a transport calls it. */
static void ddl__native_reduce(void *arg, void *dst, const void *const *srcs, int32_t src_count, uint64_t bytes) {
    if (src_count == 2) {
        ddl__reduce_pair(arg, dst, srcs[0], srcs[1], bytes);
    } else {
        ddl__reduce_many(arg, dst, (const char *const *)srcs, src_count, bytes);
    }
}

static void ddl__native_unlist(ddl_context *c, ddl__op *op) {
    ddl__op **at = &c->natives;
    while (*at != op) {
        at = &(*at)->native_next;
    }
    *at = op->native_next;
    op->native = NULL;
    op->is_native = false;
}

/* The group's rank of a rank of its set. */
static int32_t ddl__native_rank(const ddl_group *g, int32_t rank) {
    for (int32_t i = 0; rank >= 0 && i < g->size; i++) {
        if (g->host_of[i] == g->host_of[g->rank] && rank-- == 0) {
            return i;
        }
    }
    return -1;
}

/* On this rank alone, as far as is known: the others wait for it, so that they have to be told. The operation is still
 * listed: what others may write to is taken away from them (ddl__native_abandon). */
static void ddl__native_failed(ddl_context *c, const ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    ddl__break_everywhere(c, g, ddl__may_break(status) ? status : DDL_ERR_INTERNAL,
                          "the transport of rank %d %s %s: %s", g->rank,
                          op->native == NULL ? "cannot begin" : "failed in", ddl__kind_name(op->call.kind),
                          ddl_status_text(status));
}

/* Looks at one. True: it moved, and op may be gone. */
static bool ddl__native_look(ddl_context *c, ddl__op *op, int32_t looks) {
    ddl_group *g = op->group;
    int32_t rank = -1;
    if (g->doubt_ns != 0) {
        return false; /* it cannot end any more: the group breaks as soon as the other call is spelled out */
    }
    ddl_status status = op->native == NULL ? op->native_refused
                                           : g->native.table->native_test(g->native.self, g->native.set, op->native,
                                                                          looks, &rank);
    op->native_waits = ddl__native_rank(g, rank);
    if (status == DDL_IN_PROGRESS) {
        return false;
    }
    if (status == DDL_ERR_MISMATCH) {
        ddl__mismatch_seen(c, g, ddl__native_rank(g, rank), op->sequence);
        return true;
    }
    if (status < 0) {
        ddl__native_failed(c, op, status);
        return true;
    }
    ddl__native_unlist(c, op);
    ddl__step_finish(op, op->native_step);
    ddl__op_run(c, op);
    return true;
}

static int32_t ddl__natives_poll(ddl_context *c) {
    int32_t moved = 0;
    for (ddl__op *op = c->natives, *next; op != NULL; op = next) {
        next = op->native_next;
        if (ddl__native_look(c, op, 1)) {
            return moved + 1; /* the list may be another one now */
        }
    }
    return moved;
}

/* From now on it is looked at. Operations of a set end in order. `status` is that of native_start: what could not
 * begin fails at the next look, as other steps are being started here. */
static void ddl__native_list(ddl_context *c, ddl__op *op, uint32_t step, ddl_status status, void *native) {
    op->native = status == DDL_OK ? native : NULL;
    op->native_refused = status;
    op->native_step = step;
    op->native_next = NULL;
    op->native_waits = -1;
    op->is_native = true;
    ddl__op **end = &c->natives;
    while (*end != NULL) {
        end = &(*end)->native_next;
    }
    *end = op;
}

static void ddl__native_begin(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = &op->cached->plan.steps[i];
    ddl_group *g = op->group;
    char *in = op->base[s->src_space], *out = op->base[s->dst_space];
    ddl_native_call call = {.size = sizeof call,
                            .kind = (int32_t)s->slot,
                            .root = s->peer,
                            .element_bytes = op->cached->element_bytes,
                            .sequence = ++g->native.sequence,
                            .signature = op->call.signature + i,
                            .in = in != NULL ? in + s->src : NULL,
                            .out = out != NULL ? out + s->dst : NULL,
                            .bytes = (uint64_t)s->bytes,
                            .reduce = ddl__native_reduce,
                            .reduce_arg = &op->reduction};
    void *native = NULL;
    ddl_status status = g->native.table->native_start(g->native.self, g->native.set, &call, &native);
    ddl__native_list(c, op, i, status, native);
    op->natives_left--;
}

/* Operations of a set begin in the same order on all ranks: those of a group in the order of its calls, whatever
 * becomes ready first. */
static bool ddl__native_has_turn(const ddl__op *op) {
    for (const ddl__op *o = op->group->ops; o != NULL; o = o->next) {
        if (o->natives_left > 0 && (int32_t)(o->sequence - op->sequence) < 0) {
            return false;
        }
    }
    return true;
}

/* Begins a native step, or leaves it until earlier calls have begun theirs; those that waited for this one follow. */
static void ddl__step_native(ddl_context *c, ddl__op *op, uint32_t i) {
    if (!ddl__native_has_turn(op)) {
        op->native_parked = i;
        return;
    }
    ddl__native_begin(c, op, i);
    for (ddl__op *next = op; next != NULL && next->natives_left == 0;) {
        next = NULL;
        for (ddl__op *o = op->group->ops; o != NULL; o = o->next) {
            next = o->native_parked != DDL__NO_STEP && ddl__native_has_turn(o) ? o : next;
        }
        if (next != NULL) {
            i = next->native_parked;
            next->native_parked = DDL__NO_STEP;
            ddl__native_begin(c, next, i);
        }
    }
}

/* Takes an operation's memory back from the transport and from all ranks. */
static void ddl__native_abandon(ddl_context *c, ddl__op *op) {
    if (op->native != NULL) {
        op->group->native.table->native_cancel(op->group->native.self, op->group->native.set, op->native);
    }
    if (op->is_native) {
        ddl__native_unlist(c, op);
    }
}

/* >>engine/run */
/* engine, second part: running steps. A step starts when all it waits for have finished; data that comes earlier is
 * kept. One loop per op, no recursion: a finished step only queues those that it made ready. */

/* Flags of CREDIT: the sender has started collectives up to `sequence`; it wants to hear when the receiver has. */
enum { DDL__CREDIT_COLL = 1, DDL__CREDIT_WANTED = 2 };

static void ddl__op_complete(ddl_context *c, ddl__op *op);
static void ddl__op_run(ddl_context *c, ddl__op *op);

static const ddl__step *ddl__op_step(const ddl__op *op, uint32_t i) { return &op->cached->plan.steps[i]; }

/* Steps of no bytes may have no memory. */
static char *ddl__at(const ddl__op *op, int32_t space, int64_t offset) {
    return op->base[space] != NULL ? op->base[space] + offset : NULL;
}

static char *ddl__src(const ddl__op *op, const ddl__step *s) { return ddl__at(op, s->src_space, s->src); }

static char *ddl__dst(const ddl__op *op, const ddl__step *s) { return ddl__at(op, s->dst_space, s->dst); }

static void ddl__op_enqueue(ddl__op *op, uint32_t i) {
    uint32_t size = op->cached->plan.step_count;
    op->ready[(op->ready_first + op->ready_count++) % size] = i;
}

static void ddl__step_finish(ddl__op *op, uint32_t i) {
    const ddl__plan *plan = &op->cached->plan;
    const ddl__step *s = &plan->steps[i];
    op->steps[i].finished = true;
    op->left--;
    for (uint32_t k = 0; k < s->next_count; k++) {
        uint32_t next = plan->nexts[s->first_next + k];
        if (--op->steps[next].waits == 0) {
            ddl__op_enqueue(op, next);
        }
    }
}

/* >>sending */

static ddl__frame ddl__coll_frame(const ddl__op *op, const ddl__step *s, uint64_t bytes) {
    return (ddl__frame){.type = DDL__FRAME_COLL,
                        .bytes = (uint32_t)bytes,
                        .group = op->group->id,
                        .epoch = op->group->epoch,
                        .sequence = (uint64_t)op->sequence << 32 | s->slot,
                        .signature = op->call.signature};
}

/* Gives the transport the frames of a send until it borrows one. True: the step is finished. */
static bool ddl__step_push(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    ddl__step_state *st = &op->steps[i];
    int32_t peer = op->group->ranks[s->peer];
    do {
        uint64_t bytes = DDL__MIN((uint64_t)s->bytes - st->moved, (uint64_t)DDL__FRAME_MAX_PAYLOAD);
        ddl__frame f = ddl__coll_frame(op, s, bytes);
        const char *at = bytes > 0 ? ddl__src(op, s) + st->moved : NULL;
        st->moved += bytes;
        ddl_status status = ddl__post(c, peer, &st->out, &f, at);
        if (status == DDL_IN_PROGRESS) {
            st->in_transport = true;
            return false;
        }
        /* A peer that is gone needs nothing more; if it is dead, the group breaks for that reason. */
    } while (st->moved < (uint64_t)s->bytes);
    return true;
}

static void ddl__step_sent(ddl_context *c, ddl__outgoing *out, ddl_status status) {
    ddl__step_state *st = out->owner;
    ddl__op *op = st->op;
    uint32_t i = (uint32_t)out->index;
    st->in_transport = false;
    bool more = status == DDL_OK && st->moved < (uint64_t)ddl__op_step(op, i)->bytes;
    if (!more || ddl__step_push(c, op, i)) {
        ddl__step_finish(op, i);
        ddl__op_run(c, op);
    }
}

/* Small plans have no fence, so a rank can run ahead of another. It may do so by a window of bytes, and is known to be
 * caught up with when the peer is heard to have started a collective. Some peers are never heard of: the receivers of
 * broadcasts. So a half of the window that is full makes place for the next, and the peer is asked to say when it has
 * started the last collective of the full one. A send is held back only while such an answer is due, never for ever. */
static void ddl__flow_turn(ddl_context *c, ddl_group *g, int32_t peer) {
    ddl__toward *flow = &g->flows[peer];
    if (flow->ahead[0] > 0 || flow->ahead[1] < DDL__WINDOW_BYTES / 4 * 3) {
        return;
    }
    flow->ahead[0] = flow->ahead[1];
    flow->ahead_last[0] = flow->ahead_last[1];
    flow->ahead[1] = 0;
    ddl__frame f = {.type = DDL__FRAME_CREDIT, .flags = DDL__CREDIT_COLL | DDL__CREDIT_WANTED, .group = g->id,
                    .epoch = g->epoch, .sequence = flow->ahead_last[0]};
    ddl__tell(c, g->ranks[peer], f, NULL, 0);
}

/* Tells the peer how far we are. */
static void ddl__flow_answer(ddl_context *c, ddl_group *g, int32_t peer) {
    ddl__frame f = {.type = DDL__FRAME_CREDIT, .flags = DDL__CREDIT_COLL, .group = g->id, .epoch = g->epoch,
                    .sequence = g->sequence};
    ddl__tell(c, g->ranks[peer], f, NULL, 0);
}

/* The peer asks to be told when we start a collective. */
static void ddl__flow_wanted(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    ddl__toward *flow = &g->flows[peer];
    if ((int32_t)(g->sequence - sequence) >= 0) {
        ddl__flow_answer(c, g, peer);
        return;
    }
    g->wants += !flow->wants;
    flow->wants = true;
    flow->wanted = sequence;
}

/* We have started a collective: whoever asked is told. */
static void ddl__flow_caught_up(ddl_context *c, ddl_group *g) {
    for (int32_t peer = 0; g->wants > 0 && peer < g->size; peer++) {
        ddl__toward *flow = &g->flows[peer];
        if (flow->wants && (int32_t)(g->sequence - flow->wanted) >= 0) {
            flow->wants = false;
            g->wants--;
            ddl__flow_answer(c, g, peer);
        }
    }
}

static bool ddl__step_held(ddl_context *c, ddl__op *op, const ddl__step *s, ddl__step_state *st) {
    ddl__toward *flow = &op->group->flows[s->peer];
    bool fenced = op->cached->plan.fenced && s->flags != DDL__AT_ONCE;
    if (fenced || (int32_t)(flow->started - op->sequence) >= 0) {
        return false;
    }
    uint32_t cost = (uint32_t)s->bytes + DDL__AHEAD_BYTES;
    if (flow->ahead[0] > 0 && flow->ahead[0] + flow->ahead[1] + cost > DDL__WINDOW_BYTES) {
        st->held_next = NULL;
        if (flow->held_last != NULL) {
            flow->held_last->held_next = st;
        } else {
            flow->held_first = st;
        }
        flow->held_last = st;
        return true;
    }
    if (flow->ahead[1] == 0 || (int32_t)(op->sequence - flow->ahead_last[1]) > 0) {
        flow->ahead_last[1] = op->sequence;
    }
    flow->ahead[1] += cost;
    ddl__flow_turn(c, op->group, s->peer);
    return false;
}

static void ddl__step_send(ddl_context *c, ddl__op *op, uint32_t i) {
    ddl__step_state *st = &op->steps[i];
    if (!ddl__step_held(c, op, ddl__op_step(op, i), st) && ddl__step_push(c, op, i)) {
        ddl__step_finish(op, i);
    }
}

/* The peer has started a collective: what was sent ahead of it up to there is taken. */
static void ddl__flow_started(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    ddl__toward *flow = &g->flows[peer];
    if ((int32_t)(sequence - flow->started) <= 0) {
        return;
    }
    flow->started = sequence;
    for (int half = 0; half < 2; half++) {
        flow->ahead[half] = (int32_t)(sequence - flow->ahead_last[half]) >= 0 ? 0 : flow->ahead[half];
    }
    ddl__flow_turn(c, g, peer);
    while (flow->held_first != NULL) {
        ddl__step_state *st = flow->held_first;
        flow->held_first = st->held_next;
        if (flow->held_first == NULL) {
            flow->held_last = NULL;
        }
        ddl__op *op = st->op;
        ddl__step_send(c, op, (uint32_t)st->out.index);
        ddl__op_run(c, op);
        if (flow->held_last == st) {
            return; /* held again: the window is full */
        }
    }
}

/* >>receiving */

/* Bytes of a step that is ready go where they belong. */
static void ddl__step_consume(ddl__op *op, const ddl__step *s, uint64_t offset, const void *data, uint64_t bytes) {
    if (bytes == 0) {
        return;
    }
    char *dst = ddl__dst(op, s) + offset;
    if (s->kind == DDL__RECV) {
        memcpy(dst, data, bytes);
        return;
    }
    bool theirs_first = (s->flags & DDL__THEIRS_FIRST) != 0;
    if (op->user != NULL && (uintptr_t)data % (uint64_t)DDL__MIN(op->cached->element_bytes, 8) != 0) {
        ddl__reduce_aligned(&op->reduction, dst, ddl__src(op, s) + offset, data, bytes, theirs_first);
        return;
    }
    const char *own = ddl__src(op, s) + offset;
    ddl__reduce_pair(&op->reduction, dst, theirs_first ? data : own, theirs_first ? own : data, bytes);
}

static void ddl__step_receive(ddl_context *c, ddl__op *op, uint32_t i) {
    ddl__step_state *st = &op->steps[i];
    const ddl__step *s = ddl__op_step(op, i);
    st->ready = true;
    if (st->early != NULL) {
        ddl__step_consume(op, s, 0, st->early, st->moved);
        ddl__scratch_put(c, st->early);
        st->early = NULL;
    }
    if (st->arrived) {
        ddl__step_finish(op, i);
    }
}

/* >>the loop */

static void ddl__step_start(ddl_context *c, ddl__op *op, uint32_t i) {
    const ddl__step *s = ddl__op_step(op, i);
    switch (s->kind) {
    case DDL__SEND:
        ddl__step_send(c, op, i);
        return;
    case DDL__RECV:
    case DDL__RECV_REDUCE:
        ddl__step_receive(c, op, i);
        return;
    case DDL__COPY:
        if (s->bytes > 0) { /* a barrier has no memory at all */
            memmove(ddl__dst(op, s), ddl__src(op, s), (size_t)s->bytes);
        }
        break;
    case DDL__REDUCE: {
        char *dst = ddl__dst(op, s), *src = ddl__src(op, s);
        bool dst_first = (s->flags & DDL__DST_FIRST) != 0;
        ddl__reduce_pair(&op->reduction, dst, dst_first ? dst : src, dst_first ? src : dst, (uint64_t)s->bytes);
        break;
    }
    case DDL__NATIVE:
        ddl__step_native(c, op, i);
        return;
    }
    ddl__step_finish(op, i);
}

/* Starts all steps that are ready. When none is left the op is complete, and may be gone on return. Once a peer is
 * known to have called something else nothing completes any more: the group breaks as soon as that call is spelled
 * out. */
static void ddl__op_run(ddl_context *c, ddl__op *op) {
    if (op->running) {
        return;
    }
    op->running = true;
    while (op->ready_count > 0) {
        uint32_t i = op->ready[op->ready_first];
        op->ready_first = (op->ready_first + 1) % op->cached->plan.step_count;
        op->ready_count--;
        ddl__step_start(c, op, i);
    }
    op->running = false;
    if (op->left == 0 && op->group->doubt_ns == 0) {
        ddl__op_complete(c, op);
    }
}

/* Sets all steps to their beginning and queues those that wait for nothing. */
static void ddl__op_reset(ddl__op *op) {
    const ddl__plan *plan = &op->cached->plan;
    op->left = plan->step_count;
    op->ready_first = op->ready_count = op->cursor = 0;
    op->natives_left = op->cached->native_count;
    op->native_parked = DDL__NO_STEP;
    for (uint32_t i = 0; i < plan->step_count; i++) {
        ddl__step_state *st = &op->steps[i];
        st->out.done = ddl__step_sent;
        st->out.owner = st;
        st->out.index = i;
        st->op = op;
        st->held_next = NULL;
        st->waits = plan->steps[i].waits;
        st->ready = st->arrived = st->finished = st->in_transport = false;
        st->moved = 0;
        st->early = NULL;
        st->landing = NULL;
        if (st->waits == 0) {
            ddl__op_enqueue(op, i);
        }
    }
}

/* >>engine/frames */
/* engine, third part: frames of collectives as they arrive, starting an op, ending it.
 * In COLL frames `sequence` is the collective's number in the group (high half) and the slot (low half), `signature`
 * the hash of the call: a frame of another call is never mistaken for ours. */

static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence);
static void ddl__lengths_differ(ddl_context *c, ddl__op *op, int32_t peer, uint64_t came, uint64_t expected);
static void ddl__announced_check(ddl_context *c, ddl_group *g, const ddl__op *op);

static ddl__op *ddl__op_find(const ddl_group *g, uint32_t sequence) {
    for (ddl__op *op = g->ops; op != NULL; op = op->next) {
        if (op->sequence == sequence) {
            return op;
        }
    }
    return NULL;
}

static ddl__flight *ddl__record_of(ddl_group *g, uint32_t sequence) {
    ddl__flight *r = &g->records[sequence % DDL__RECORDS];
    return r->sequence == sequence ? r : NULL;
}

/* The receiving step of (peer, slot), or DDL__NO_STEP. Frames mostly come in the order of the index. */
static uint32_t ddl__op_recv_step(ddl__op *op, int32_t peer, uint32_t slot) {
    const ddl__cached *e = op->cached;
    uint64_t key = (uint64_t)(uint32_t)peer << 32 | slot;
    uint32_t low = 0, high = e->recv_count;
    if (op->cursor < high && ddl__recv_key(ddl__op_step(op, e->recvs[op->cursor])) == key) {
        low = op->cursor;
        high = low;
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ddl__recv_key(ddl__op_step(op, e->recvs[middle])) < key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == e->recv_count || ddl__recv_key(ddl__op_step(op, e->recvs[low])) != key) {
        return DDL__NO_STEP;
    }
    if (op->steps[e->recvs[low]].moved + DDL__FRAME_MAX_PAYLOAD >= (uint64_t)ddl__op_step(op, e->recvs[low])->bytes) {
        op->cursor = low + 1;
    }
    return e->recvs[low];
}

/* Counts bytes that arrived for a step; the step or the whole op may finish. */
static void ddl__step_arrived(ddl_context *c, ddl__op *op, uint32_t i, uint64_t bytes) {
    ddl__step_state *st = &op->steps[i];
    st->moved += bytes;
    if (st->moved < (uint64_t)ddl__op_step(op, i)->bytes) {
        return;
    }
    st->arrived = true;
    if (st->ready) {
        ddl__step_finish(op, i);
        ddl__op_run(c, op);
    }
}

/* Bytes of the frame that comes next for a step: senders cut them as large as can be. */
static uint64_t ddl__step_next(const ddl__op *op, uint32_t i) {
    return DDL__MIN((uint64_t)ddl__op_step(op, i)->bytes - op->steps[i].moved, (uint64_t)DDL__FRAME_MAX_PAYLOAD);
}

static bool ddl__step_expects(const ddl__op *op, uint32_t i, uint64_t bytes) {
    const ddl__step_state *st = &op->steps[i];
    return !st->arrived && st->landing == NULL && bytes == ddl__step_next(op, i);
}

/* A frame of a running op, its payload whole. */
static ddl_status ddl__op_deliver(ddl_context *c, ddl__op *op, int32_t peer, const ddl__frame *f, const void *payload) {
    uint32_t i = ddl__op_recv_step(op, peer, (uint32_t)f->sequence);
    if (i == DDL__NO_STEP || !ddl__step_expects(op, i, f->bytes)) {
        if (op->call.kind != DDL_ALL_TO_ALLV) {
            return DDL_ERR_CORRUPT;
        }
        bool over = i == DDL__NO_STEP || op->steps[i].arrived;
        ddl__lengths_differ(c, op, peer, f->bytes, over ? 0 : ddl__step_next(op, i));
        return DDL_OK;
    }
    ddl__step_state *st = &op->steps[i];
    const ddl__step *s = ddl__op_step(op, i);
    if (st->ready) {
        ddl__step_consume(op, s, st->moved, payload, f->bytes);
    } else if (f->bytes > 0) {
        if (st->early == NULL) {
            st->early = ddl__scratch_get(c, (size_t)s->bytes);
        }
        if (st->early == NULL) {
            ddl__break_everywhere(c, op->group, DDL_ERR_NOMEM, "rank %d has no memory to keep what came early",
                                  op->group->rank);
            return DDL_OK;
        }
        memcpy(st->early + st->moved, payload, f->bytes);
    }
    ddl__step_arrived(c, op, i, f->bytes);
    return DDL_OK;
}

static ddl_status ddl__early_keep(ddl_context *c, ddl_group *g, int32_t peer, const ddl__frame *f,
                                  const void *payload) {
    ddl__early *e = ddl__scratch_get(c, sizeof *e + f->bytes);
    if (e == NULL) {
        ddl__break_everywhere(c, g, DDL_ERR_NOMEM, "rank %d has no memory to keep what came early", g->rank);
        return DDL_OK;
    }
    e->next = NULL;
    e->source = peer;
    e->frame = *f;
    if (f->bytes > 0) {
        memcpy(e->data, payload, f->bytes);
    }
    c->stats.unexpected_bytes += f->bytes;
    ddl__early **end = &g->early;
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = e;
    return DDL_OK;
}

/* Who the frame is for. *out_op NULL: for nobody now (*out_early: for a collective to come). */
static void ddl__coll_route(ddl_context *c, int32_t peer, const ddl__frame *f, ddl_group **out_group, ddl__op **out_op,
                            bool *out_early) {
    *out_op = NULL;
    *out_early = false;
    ddl_group *g = *out_group = ddl__frame_group(c, peer, f);
    if (g == NULL || g->broken != DDL_OK) {
        *out_group = NULL;
        return;
    }
    uint32_t sequence = (uint32_t)(f->sequence >> 32);
    ddl__flow_started(c, g, g->rank_of[peer], sequence);
    ddl__op *op = ddl__op_find(g, sequence);
    ddl__flight *record = op == NULL && DDL__CHECKS ? ddl__record_of(g, sequence) : NULL;
    uint64_t ours = op != NULL ? op->call.signature : record != NULL ? record->signature : f->signature;
    if (DDL__CHECKS && ours != f->signature) {
        ddl__mismatch_seen(c, g, g->rank_of[peer], sequence);
        return;
    }
    *out_op = op;
    *out_early = op == NULL && (int32_t)(sequence - g->sequence) > 0;
}

static ddl_status ddl__on_coll(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g;
    ddl__op *op;
    bool early;
    ddl__coll_route(c, peer, f, &g, &op, &early);
    if (op != NULL) {
        ddl_status status = ddl__op_deliver(c, op, g->rank_of[peer], f, payload);
        if (status < 0) {
            ddl__log(&c->base, DDL_LOG_WARN, "rank %d sent a part of a collective that is not expected (group \"%s\")",
                     peer, g->name);
        }
        return status;
    }
    return early ? ddl__early_keep(c, g, g->rank_of[peer], f, payload) : DDL_OK;
}

/* Straight into the caller's memory when the step may write it already and does not reduce. */
static void *ddl__place_coll(ddl_context *c, int32_t peer, const ddl__frame *f, ddl__landing *landing) {
    ddl_group *g;
    ddl__op *op;
    bool early;
    ddl__coll_route(c, peer, f, &g, &op, &early);
    uint32_t i = op == NULL ? DDL__NO_STEP : ddl__op_recv_step(op, g->rank_of[peer], (uint32_t)f->sequence);
    if (i == DDL__NO_STEP || !ddl__step_expects(op, i, f->bytes)) {
        return NULL;
    }
    ddl__step_state *st = &op->steps[i];
    if (!st->ready || ddl__op_step(op, i)->kind != DDL__RECV || f->bytes == 0) {
        return NULL;
    }
    landing->owner = op;
    landing->index = i;
    st->landing = landing;
    return ddl__dst(op, ddl__op_step(op, i)) + st->moved;
}

static void ddl__placed_coll(ddl_context *c, int32_t peer, ddl__landing *landing, ddl_status status) {
    (void)peer;
    ddl__op *op = landing->owner;
    if (op == NULL) {
        return; /* abandoned meanwhile */
    }
    op->steps[landing->index].landing = NULL;
    if (status == DDL_OK) {
        ddl__step_arrived(c, op, (uint32_t)landing->index, landing->frame.bytes);
    }
}

static ddl_status ddl__on_credit(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (g == NULL) {
        return DDL_OK;
    }
    if ((f->flags & DDL__CREDIT_COLL) != 0) {
        ddl__flow_started(c, g, g->rank_of[peer], (uint32_t)f->sequence);
        if ((f->flags & DDL__CREDIT_WANTED) != 0) {
            ddl__flow_wanted(c, g, g->rank_of[peer], (uint32_t)f->sequence);
        }
        return DDL_OK;
    }
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint32_t taken = ddl__get_u32(&r);
    return !r.bad && ddl__credit(g, g->rank_of[peer], taken) ? DDL_OK : DDL_ERR_CORRUPT;
}

/* >>start and end */

/* The newest call of a group, which is about to begin. */
static void ddl__record_start(ddl_group *g, const ddl__call *call, const char *algorithm, uint64_t now) {
    g->records[g->sequence % DDL__RECORDS] = (ddl__flight){.order = ++g->context->called,
                                                           .sequence = g->sequence,
                                                           .root = call->root,
                                                           .op = call->op,
                                                           .kind = (uint8_t)call->kind,
                                                           .dtype = (uint8_t)call->dtype,
                                                           .status = DDL_IN_PROGRESS,
                                                           .nature = call->nature,
                                                           .tensors = call->tensors,
                                                           .count = ddl__call_elements(g, call),
                                                           .detail = call->detail,
                                                           .call_hash = call->call_hash,
                                                           .signature = call->signature,
                                                           .start_ns = now,
                                                           .algorithm = algorithm};
}

static void ddl__record_end(ddl_group *g, uint32_t sequence, ddl_status status, uint64_t now) {
    ddl__flight *record = ddl__record_of(g, sequence);
    if (record != NULL) {
        record->status = (int16_t)status;
        record->end_ns = now;
    }
}

/* Takes the op off its group and gives its memory back for the next run. */
static void ddl__op_retire(ddl_context *c, ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    for (ddl__op **at = &g->ops; *at != NULL; at = &(*at)->next) {
        if (*at == op) {
            *at = op->next;
            break;
        }
    }
    if (DDL__CHECKS) {
        ddl__record_end(g, op->sequence, status, ddl__now_ns());
    }
    ddl__scratch_put(c, op->packed_in);
    ddl__scratch_put(c, op->packed_out);
    op->packed_in = op->packed_out = NULL;
    if (op->user != NULL) {
        ddl__user_op_drop(c, op->user);
        op->user = NULL;
    }
    op->request->op = NULL;
    op->cached->pins--;
    ddl__op_put(c, op->cached, op);
}

static bool ddl__writes_out(const ddl__op *op) {
    bool rooted = op->call.kind == DDL_REDUCE || op->call.kind == DDL_GATHER || op->call.kind == DDL_GATHERV;
    bool first = op->call.kind == DDL_EXSCAN && op->group->rank == 0;
    return op->call.out_bytes > 0 && !first && (!rooted || op->group->rank == op->call.root);
}

/* The sum becomes the average, of what ddl__averages_scaled left to do. */
static void ddl__op_average(ddl__op *op) {
    size_t count = (size_t)op->call.out_bytes / (size_t)op->cached->element_bytes;
    int32_t n = op->group->size;
    if (!ddl__averages_scaled(op->group, &op->call)) {
        ddl__average(op->base[DDL__OUT], count, op->call.dtype, n);
    } else if (n * ddl__average_scale(n) < 1) {
        ddl__apply_float(op->base[DDL__OUT], op->base[DDL__OUT], count, op->call.dtype, n * ddl__average_scale(n), 1);
    }
}

static void ddl__op_complete(ddl_context *c, ddl__op *op) {
    ddl_request *r = op->request;
    if (ddl__writes_out(op)) {
        if (op->call.op == DDL_AVG) {
            ddl__op_average(op);
        }
        if (op->packed_out != NULL) {
            ddl__pack(&op->call.out, op->packed_out, true);
        }
    }
    ddl__op_retire(c, op, DDL_OK);
    ddl__request_done(r, DDL_OK);
}

/* Takes the op's memory back from transports and landings; what arrives for it later is dropped. */
static void ddl__op_abandon(ddl_context *c, ddl__op *op, ddl_status status) {
    ddl_group *g = op->group;
    ddl__native_abandon(c, op);
    for (uint32_t i = 0; i < op->cached->plan.step_count; i++) {
        ddl__step_state *st = &op->steps[i];
        const ddl__step *s = ddl__op_step(op, i);
        if (st->in_transport) {
            st->in_transport = false;
            ddl__recall(c, g->ranks[s->peer], &st->out);
        }
        if (st->landing != NULL) {
            st->landing->owner = NULL;
            ddl__landing_abandon(c, g->ranks[s->peer], st->landing);
            st->landing = NULL;
        }
        ddl__scratch_put(c, st->early);
        st->early = NULL;
    }
    for (int32_t peer = 0; peer < g->size; peer++) {
        g->flows[peer].held_first = g->flows[peer].held_last = NULL; /* the group is broken: all its ops end */
    }
    ddl__op_retire(c, op, status);
}

static void ddl__describe_record(const ddl_group *g, const ddl__flight *r, ddl__text *text) {
    ddl__call call = {.kind = (ddl_kind)r->kind, .op = r->op, .dtype = (ddl_dtype)r->dtype, .root = r->root,
                      .count = r->count, .tensors = r->tensors, .nature = r->nature, .detail = r->detail};
    ddl__describe_call(g, &call, r->algorithm, text);
}

/* The collective of any group that this rank called last before one; NULL: none is known. */
static ddl__flight *ddl__record_before(ddl_context *c, uint64_t order, ddl_group **out_group) {
    ddl__flight *last = NULL;
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        uint32_t s = g->magic == DDL__GROUP_MAGIC ? g->sequence : 0;
        ddl__flight *r = NULL;
        while (s > 0 && (r = ddl__record_of(g, s)) != NULL && r->order >= order) {
            s--;
        }
        if (s > 0 && r != NULL && (last == NULL || r->order > last->order)) {
            last = r;
            *out_group = g;
        }
    }
    return last;
}

/* What this rank called before, oldest first, from the flight recorder: with the call itself it tells where the program
 * was. */
static void ddl__describe_before(ddl_group *g, uint32_t sequence, ddl__text *text) {
    ddl_group *groups[2] = {NULL, NULL};
    const ddl__flight *own = ddl__record_of(g, sequence);
    ddl__flight *last = own != NULL ? ddl__record_before(g->context, own->order, &groups[1]) : NULL;
    ddl__flight *calls[2] = {last != NULL ? ddl__record_before(g->context, last->order, &groups[0]) : NULL, last};
    for (int32_t i = 0; i < 2; i++) {
        if (calls[i] != NULL) {
            ddl__text_add(text, "%s\"%s\" #%u ", text->used == 0 ? " (before it: " : ", ", groups[i]->name,
                          calls[i]->sequence);
            ddl__describe_record(groups[i], calls[i], text);
        }
    }
    ddl__text_add(text, "%s", text->used > 0 ? ")" : "");
}

/* Ends all collectives of a group that broke. */
static void ddl__ops_fail_all(ddl_group *g) {
    while (g->ops != NULL) {
        ddl__op *op = g->ops;
        ddl_request *r = op->request;
        char call[200], before[240] = "";
        ddl__text history = {before, sizeof before, 0};
        ddl__describe_before(g, op->sequence, &history);
        ddl__text text = {call, sizeof call, 0};
        ddl__describe_call(g, &op->call, op->cached->plan.algorithm, &text);
        uint32_t sequence = op->sequence;
        ddl__op_abandon(g->context, op, g->broken);
        ddl__request_fail(r, g->broken, "%s, operation %u of group \"%s\": %s%s", call, sequence, g->name,
                          g->broken_text, before);
    }
}

/* Frames that came before the call and are of another one. False: the call must not begin. */
static bool ddl__early_agrees(ddl_context *c, ddl_group *g, const ddl__op *op) {
    for (const ddl__early *e = g->early; e != NULL; e = e->next) {
        if ((uint32_t)(e->frame.sequence >> 32) == op->sequence && e->frame.signature != op->call.signature) {
            ddl__mismatch_seen(c, g, e->source, op->sequence);
            return false;
        }
    }
    return true;
}

/* Hands an op the frames that came before it. */
static void ddl__early_take(ddl_context *c, ddl_group *g, uint32_t sequence) {
    for (ddl__early **at = &g->early; *at != NULL;) {
        ddl__early *e = *at;
        if ((uint32_t)(e->frame.sequence >> 32) != sequence) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        c->stats.unexpected_bytes -= e->frame.bytes;
        ddl__op *op = ddl__op_find(g, sequence);
        if (op != NULL && ddl__op_deliver(c, op, e->source, &e->frame, e->data) < 0) {
            ddl__missed(c, g->ranks[e->source], ddl__how_unexpected);
        }
        ddl__scratch_put(c, e);
        at = &g->early; /* the list may have changed */
    }
}

static void ddl__engine_group_free(ddl_group *g) {
    ddl_context *c = g->context;
    ddl__native_close(g);
    ddl__free(&c->base, g->fast);
    g->fast = NULL;
    while (g->early != NULL) {
        ddl__early *e = g->early;
        g->early = e->next;
        c->stats.unexpected_bytes -= e->frame.bytes;
        ddl__scratch_put(c, e);
    }
    while (g->cache != NULL) {
        ddl__cached *e = g->cache;
        g->cache = e->next;
        ddl__cached_free(c, e);
    }
}

/* >>engine/watch */
/* engine, fourth part: who is missing, and who calls something else.
 *
 * A rank that has waited 100 ms, or got a frame of another signature, tells those it waits for what it called (QUERY:
 * sequence, hash of the call, signature, call); whoever finds that its own call of that number differs tells the whole
 * group both calls (MISMATCH), and the group breaks everywhere with the same sentence. Before a stall report all
 * members are asked, and their answers (STATUS) are in the report. */

#define DDL__ASK_FIRST_NS (100 * DDL__NS_PER_MS)
#define DDL__ASK_AGAIN_NS (1 * DDL__NS_PER_S)
#define DDL__MISMATCH_NS (500 * DDL__NS_PER_MS) /* for the other side to spell out its call */

typedef enum ddl__answer_code {
    DDL__SILENT = 0,      /* was asked, has not answered: computing, or stopped */
    DDL__NOT_ARRIVED = 1, /* is in ddl, but has not called this collective */
    DDL__ARRIVED = 2,
    DDL__PASSED = 3 /* has finished it */
} ddl__answer_code;

typedef struct ddl__answer {
    uint8_t code;
    uint32_t sequence; /* of its newest collective in the group */
    char doing[56];
} ddl__answer;

/* >>telling the group */

/* Passes bad news on, once, over the links that are there: whoever told us may leave before it has connected to all. */
static void ddl__pass_on(ddl_context *c, const ddl_group *g, int32_t but, const ddl__frame *f, const void *payload) {
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__link *l = &c->links[g->ranks[i]];
        if (i != g->rank && g->ranks[i] != but && l->connected && l->life == DDL__ALIVE) {
            ddl__frame same = {.type = f->type, .group = f->group, .epoch = f->epoch};
            ddl__tell(c, g->ranks[i], same, payload, f->bytes);
        }
    }
}

static ddl_status ddl__on_mismatch(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[DDL__SENTENCE_BYTES];
    int32_t code = -(int32_t)ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad || !ddl__may_break((ddl_status)code)) {
        return DDL_ERR_CORRUPT;
    }
    if (g != NULL && g->broken == DDL_OK) {
        ddl__pass_on(c, g, peer, f, payload);
        ddl__group_break(g, (ddl_status)code, "%s", text);
    }
    return DDL_OK;
}

/* >>asking */

/* Our call of that number, running or over; NULL when we have not made it, or have forgotten it. */
static const ddl__flight *ddl__own_call(ddl_group *g, uint32_t sequence, char *out, size_t bytes) {
    const ddl__flight *r = ddl__record_of(g, sequence);
    if (r == NULL || (int32_t)(sequence - g->sequence) > 0) {
        return NULL;
    }
    ddl__text text = {out, bytes, 0};
    const ddl__op *op = ddl__op_find(g, sequence);
    if (op != NULL) { /* which knows more of it */
        ddl__describe_call(g, &op->call, op->cached->plan.algorithm, &text);
    } else {
        ddl__describe_record(g, r, &text);
    }
    return r;
}

/* Says what we called as that number, and makes the peer look whether it called the same. */
static void ddl__ask(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    char ours[160];
    const ddl__flight *r = ddl__own_call(g, sequence, ours, sizeof ours);
    if (r == NULL || c->links[g->ranks[peer]].life != DDL__ALIVE) {
        return;
    }
    uint8_t payload[256];
    ddl__writer w = ddl__writer_of(payload, sizeof payload);
    ddl__put_u32(&w, sequence);
    ddl__put_u64(&w, r->call_hash);
    ddl__put_u64(&w, r->signature);
    ddl__put_string(&w, ours);
    ddl__frame f = {.type = DDL__FRAME_QUERY, .group = g->id, .epoch = g->epoch};
    ddl__tell(c, g->ranks[peer], f, payload, w.at);
}

/* True when a receive from the peer is still to come. */
static bool ddl__op_waits_for(const ddl__op *op, int32_t peer) {
    const ddl__cached *e = op->cached;
    if (op->is_native) {
        return op->native_waits == peer;
    }
    for (uint32_t i = 0; i < e->recv_count; i++) {
        const ddl__step *s = ddl__op_step(op, e->recvs[i]);
        if (s->peer == peer && !op->steps[e->recvs[i]].arrived) {
            return true;
        }
    }
    return false;
}

static void ddl__ask_members(ddl_context *c, ddl__op *op, bool all) {
    if (op->answers == NULL) {
        op->answers = ddl__alloc_array(&c->base, (size_t)op->group->size, sizeof *op->answers);
    }
    for (int32_t i = 0; i < op->group->size && op->answers != NULL; i++) {
        if (i != op->group->rank && (all || op->is_native || ddl__op_waits_for(op, i))) {
            ddl__ask(c, op->group, i, op->sequence);
        }
    }
}

/* Both calls are known: everybody learns them. */
static void ddl__mismatch_spell(ddl_context *c, ddl_group *g, uint32_t sequence, const char *ours, int32_t peer,
                                const char *theirs) {
    ddl__break_everywhere(
        c, g, DDL_ERR_MISMATCH,
        "operation %u is different on two ranks: rank %d called %s, but rank %d called %s. All ranks of a "
        "group must make the same calls in the same order",
        sequence, g->rank, ours, peer, theirs);
}

/* A peer has told its call of a number, and the signatures differ. Where the calls are alike, an earlier one was not:
 * the question goes back and forth, to the call before, until the first that differs is found. */
static void ddl__mismatch_found(ddl_context *c, ddl_group *g, const ddl__flight *own, const char *ours, int32_t peer,
                                uint64_t call_hash, const char *theirs) {
    if (own->call_hash != call_hash) {
        ddl__mismatch_spell(c, g, own->sequence, ours, peer, theirs);
    } else if (ddl__record_of(g, own->sequence - 1) != NULL) {
        ddl__ask(c, g, peer, own->sequence - 1);
    } else {
        ddl__break_everywhere(c, g, DDL_ERR_MISMATCH,
                              "ranks %d and %d made different calls some time before operation %u. "
                              "All ranks of a group must make the same calls in the same order",
                              g->rank, peer, own->sequence);
    }
}

static ddl_status ddl__on_query(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint32_t sequence = ddl__get_u32(&r);
    uint64_t call_hash = ddl__get_u64(&r), signature = ddl__get_u64(&r);
    char theirs[160], ours[160];
    ddl__get_string(&r, theirs, sizeof theirs);
    if (r.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (g == NULL) {
        return DDL_OK;
    }
    int32_t from = g->rank_of[peer];
    uint8_t code = DDL__NOT_ARRIVED;
    const ddl__flight *own = ddl__own_call(g, sequence, ours, sizeof ours);
    if (own != NULL) {
        if (own->signature != signature) {
            ddl__mismatch_found(c, g, own, ours, from, call_hash, theirs);
            return DDL_OK;
        }
        code = ddl__op_find(g, sequence) != NULL ? DDL__ARRIVED : DDL__PASSED;
    } else if ((int32_t)(sequence - g->sequence) > 0) {
        g->announced =
            (ddl__announced){.sequence = sequence, .peer = from, .call_hash = call_hash, .signature = signature};
        snprintf(g->announced.call, sizeof g->announced.call, "%s", theirs);
    }
    uint8_t out[80];
    ddl__writer w = ddl__writer_of(out, sizeof out);
    ddl__put_u32(&w, sequence);
    ddl__put_u8(&w, code);
    ddl__put_u32(&w, g->sequence);
    ddl__put_string(&w, c->doing != NULL ? c->doing : "other code");
    ddl__tell(c, peer, (ddl__frame){.type = DDL__FRAME_STATUS, .group = g->id, .epoch = g->epoch}, out, w.at);
    return DDL_OK;
}

static ddl_status ddl__on_status(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    ddl__answer answer = {0};
    uint32_t sequence = ddl__get_u32(&r);
    answer.code = ddl__get_u8(&r);
    answer.sequence = ddl__get_u32(&r);
    ddl__get_string(&r, answer.doing, sizeof answer.doing);
    if (r.bad || answer.code > DDL__PASSED) {
        return DDL_ERR_CORRUPT;
    }
    ddl__op *op = g != NULL ? ddl__op_find(g, sequence) : NULL;
    if (op != NULL && op->answers != NULL) {
        op->answers[g->rank_of[peer]] = answer;
    }
    return DDL_OK;
}

/* A frame shows that the peer's call differs from ours. It is asked to spell it out; if it cannot (it computes), the
 * group breaks without its words. */
static void ddl__mismatch_seen(ddl_context *c, ddl_group *g, int32_t peer, uint32_t sequence) {
    if (g->doubt_ns == 0) {
        g->doubt_ns = ddl__now_ns();
        g->doubt_sequence = sequence;
        ddl__ask(c, g, peer, sequence);
    }
}

/* The lengths of an all_to_allv are each pair's own, and no part of the signature. */
static void ddl__lengths_differ(ddl_context *c, ddl__op *op, int32_t peer, uint64_t came, uint64_t expected) {
    int32_t rank = op->group->rank;
    ddl__break_everywhere(
        c, op->group, DDL_ERR_MISMATCH,
        "operation %u, all_to_allv: rank %d sends %s to rank %d than that expects (%llu bytes came where "
        "%llu were next): send_counts[%d] of rank %d must be recv_counts[%d] of rank %d",
        op->sequence, peer, came > expected ? "more" : "less", rank, (unsigned long long)came,
        (unsigned long long)expected, rank, peer, peer, rank);
}

/* Somebody asked for this collective before we called it: if that was another call, we know at once. */
static void ddl__announced_check(ddl_context *c, ddl_group *g, const ddl__op *op) {
    if (g->announced.sequence != op->sequence || g->announced.signature == op->call.signature) {
        return;
    }
    ddl__announced a = g->announced; /* what is said to others may bring a newer one */
    char ours[160];
    const ddl__flight *own = ddl__own_call(g, op->sequence, ours, sizeof ours);
    if (own != NULL) {
        ddl__mismatch_found(c, g, own, ours, a.peer, a.call_hash, a.call);
    }
}

/* >>request ops of a collective */

static void ddl__explain_answer(const ddl__op *op, int32_t rank, ddl__text *text) {
    const ddl__answer *a = op->answers != NULL ? &op->answers[rank] : NULL;
    if (a == NULL || a->code == DDL__SILENT) {
        ddl__text_add(text, " rank %d (does not answer: it computes outside ddl, or is stopped)", rank);
    } else if (a->code == DDL__NOT_ARRIVED) {
        ddl__text_add(text, " rank %d (has not arrived; its last collective here was operation %u; now in %s)", rank,
                      a->sequence, a->doing);
    } else {
        ddl__text_add(text, " rank %d (has arrived)", rank);
    }
}

static void ddl__coll_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    (void)c;
    const ddl__op *op = r->op;
    const ddl_group *g = op->group;
    ddl__describe_call(g, &op->call, op->cached->plan.algorithm, text);
    ddl__text_add(text, ", operation %u of group \"%s\" (%d ranks), rank %d waits for", op->sequence, g->name, g->size,
                  g->rank);
    int32_t arrived = 1, named = 0;
    for (int32_t i = 0; i < g->size; i++) {
        bool here = op->answers != NULL && op->answers[i].code >= DDL__ARRIVED;
        arrived += i != g->rank && here;
        if (i != g->rank && !here && (op->answers != NULL || ddl__op_waits_for(op, i)) && named++ < 8) {
            ddl__text_add(text, "%s", named > 1 ? "," : "");
            ddl__explain_answer(op, i, text);
        }
    }
    if (named == 0) {
        ddl__text_add(text, " data of ranks that have all arrived");
    }
    ddl__text_add(text, "; %d of %d have arrived", arrived, g->size);
}

/* Often enough that everybody has answered before a report or a deadline, however soon that is. */
static uint64_t ddl__ask_interval(const ddl_group *g) {
    uint64_t ns = DDL__ASK_AGAIN_NS;
    if (g->stall_ms > 0) {
        ns = DDL__MIN(ns, (uint64_t)g->stall_ms * DDL__NS_PER_MS / 4);
    }
    return g->timeout_ms > 0 ? DDL__MIN(ns, (uint64_t)g->timeout_ms * DDL__NS_PER_MS / 4) : ns;
}

static void ddl__coll_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    ddl__op *op = r->op;
    ddl_group *g = op->group;
    uint64_t now = ddl__now_ns();
    if (g->doubt_ns != 0 && now - g->doubt_ns > DDL__MISMATCH_NS) {
        char ours[160] = "something that it has forgotten";
        ddl__own_call(g, g->doubt_sequence, ours, sizeof ours);
        ddl__break_everywhere(c, g, DDL_ERR_MISMATCH,
                              "operation %u is different on two ranks: rank %d called %s, another "
                              "rank called something else and does not answer",
                              g->doubt_sequence, g->rank, ours);
        return;
    }
    for (int32_t i = 0; i < g->size; i++) {
        if (c->links[g->ranks[i]].life == DDL__LEFT && ddl__is_drained(g, i) && ddl__op_waits_for(op, i)) {
            ddl__break_everywhere(c, g, DDL_ERR_PEER,
                                  "rank %d has left the job (it called ddl_finalize) and takes no part "
                                  "in operation %u",
                                  i, op->sequence);
            return;
        }
    }
    uint64_t interval = ddl__ask_interval(g);
    if (waited > DDL__MIN(DDL__ASK_FIRST_NS, interval) && now - op->asked_ns > interval) {
        op->asked_ns = now;
        uint64_t stall = (uint64_t)g->stall_ms * DDL__NS_PER_MS, limit = (uint64_t)g->timeout_ms * DDL__NS_PER_MS;
        bool all = (g->stall_ms > 0 && waited > stall / 2) || (g->timeout_ms > 0 && waited > limit / 2);
        ddl__ask_members(c, op, all);
    }
}

static void ddl__coll_abandon(ddl_context *c, ddl_request *r) {
    ddl__op *op = r->op;
    char text[DDL__SENTENCE_BYTES - 256];
    ddl__text out = {text, sizeof text, 0};
    ddl__coll_explain(c, r, &out);
    ddl_group *g = op->group;
    ddl__op_abandon(c, op, DDL_ERR_TIMEOUT);
    ddl__break_everywhere(c, g, DDL_ERR_TIMEOUT, "rank %d gave up: %s", g->rank, text);
}

static int32_t ddl__coll_expect(ddl_context *c, ddl_request *r) {
    (void)c;
    const ddl__op *op = r->op;
    const ddl__cached *e = op->cached;
    uint32_t first = op->cursor < e->recv_count ? op->cursor : 0;
    for (uint32_t n = 0; n < e->recv_count && n < 16; n++) {
        uint32_t i = e->recvs[(first + n) % e->recv_count];
        if (!op->steps[i].arrived) {
            return op->group->ranks[ddl__op_step(op, i)->peer];
        }
    }
    return -1;
}

static const ddl__request_ops ddl__coll_ops = {ddl__coll_abandon, ddl__coll_explain, ddl__coll_tick, ddl__coll_expect,
                                               NULL};

/* >>coll/call */
/* coll, first part: what a caller passed, checked and made into a ddl__call; starting it. */

enum { DDL__OPS_FIRST = 256, DDL__OPS_MAX = 64 };

static ddl__user_op *ddl__user_op_of(ddl_context *c, ddl_op op) {
    ddl__user_op *user = op >= DDL__OPS_FIRST ? c->ops->first : NULL;
    while (user != NULL && (user->id != op || user->freed)) {
        user = user->next;
    }
    return user;
}

static bool ddl__kind_reduces(ddl_kind kind) {
    ddl_kind base = ddl__kind_base(kind);
    return base == DDL_REDUCE || base == DDL_ALL_REDUCE || base == DDL_REDUCE_SCATTER || base == DDL_SCAN ||
           base == DDL_EXSCAN;
}

static bool ddl__kind_rooted(ddl_kind kind) {
    ddl_kind base = ddl__kind_base(kind);
    return base == DDL_BROADCAST || base == DDL_REDUCE || base == DDL_GATHER || base == DDL_SCATTER;
}

/* Which tensors this rank's call looks at. */
static bool ddl__uses_in(const ddl_group *g, const ddl__call *call) {
    return call->kind != DDL_BARRIER && (ddl__kind_base(call->kind) != DDL_SCATTER || g->rank == call->root);
}

static bool ddl__uses_out(const ddl_group *g, const ddl__call *call) {
    ddl_kind base = ddl__kind_base(call->kind);
    bool at_root = base == DDL_REDUCE || base == DDL_GATHER;
    return call->kind != DDL_BARRIER && call->kind != DDL_BROADCAST && (!at_root || g->rank == call->root);
}

/* >>checks */

static ddl_status ddl__check_op(ddl_group *g, ddl__call *call, const char *what) {
    ddl_context *c = g->context;
    call->commutative = true;
    if (!ddl__kind_reduces(call->kind)) {
        call->op = DDL_OP_NONE;
        return DDL_OK;
    }
    if (call->op >= DDL__OPS_FIRST) {
        const ddl__user_op *user = ddl__user_op_of(c, call->op);
        if (user == NULL) {
            return ddl__error(c, DDL_ERR_ARG, "%s: op %d was not created, or was freed", what, call->op);
        }
        call->commutative = user->commutative;
        call->nature = user->fn == NULL ? DDL__SCALED_SUM : user->commutative ? DDL__FUNCTION : DDL__FUNCTION_IN_ORDER;
        return user->fn != NULL || ddl__op_valid(DDL_SUM, call->dtype)
                   ? DDL_OK
                   : ddl__error(c, DDL_ERR_ARG, "%s: a scaled sum of %s makes no sense", what,
                                ddl_dtype_name(call->dtype));
    }
    if (call->op <= DDL_OP_NONE || call->op > DDL_MAX_INDEX) {
        return ddl__error(c, DDL_ERR_ARG, "%s: %d is no op", what, call->op);
    }
    bool scan = call->kind == DDL_SCAN || call->kind == DDL_EXSCAN;
    if (!ddl__op_valid(call->op, call->dtype) || (scan && call->op == DDL_AVG)) {
        return ddl__error(c, DDL_ERR_ARG, "%s: op %s (%d) makes no sense for %s%s", what, ddl__op_name(call->op),
                          call->op, ddl_dtype_name(call->dtype), scan ? " in a scan" : "");
    }
    return DDL_OK;
}

/* Elements of `in` and `out` that a call of `count` elements needs; -1: that tensor is not looked at. */
static void ddl__needed(const ddl_group *g, const ddl__call *call, int64_t *out_in, int64_t *out_out) {
    int64_t n = g->size, c = call->count;
    ddl_kind base = ddl__kind_base(call->kind);
    bool many_in = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER || base == DDL_ALL_TO_ALL;
    bool many_out = base == DDL_GATHER || base == DDL_ALL_GATHER || base == DDL_ALL_TO_ALL;
    *out_in = many_in ? n * c : c;
    *out_out = many_out ? n * c : c;
}

/* All ranks' data together, in bytes, at most: sums of two such do not overflow. */
#define DDL__WHOLE_MAX (INT64_MAX / 2)

static ddl_status ddl__too_large(ddl_group *g, const char *what) {
    return ddl__error(g->context, DDL_ERR_ARG, "%s on group \"%s\" of %d ranks: the data of all ranks together is "
                      "larger than %lld bytes", what, g->name, g->size, (long long)DDL__WHOLE_MAX);
}

static ddl_status ddl__check_counts(ddl_group *g, ddl__call *call, int64_t in_count, int64_t out_count,
                                    const char *what) {
    int64_t need_in, need_out;
    bool uses_in = ddl__uses_in(g, call), uses_out = ddl__uses_out(g, call);
    ddl_kind base = ddl__kind_base(call->kind);
    bool by_out = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER;
    call->count = base == DDL_ALL_TO_ALL ? in_count / g->size : by_out ? out_count : in_count;
    if (call->count > DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(call->dtype) / g->size) {
        return ddl__too_large(g, what);
    }
    ddl__needed(g, call, &need_in, &need_out);
    if ((uses_in && in_count != need_in) || (uses_out && out_count != need_out)) {
        return ddl__error(g->context, DDL_ERR_ARG,
                          "%s on group \"%s\" of %d ranks: `in` has %lld elements and `out` has %lld, but with %lld "
                          "elements of each rank `in` must have %lld and `out` %lld",
                          what, g->name, g->size, (long long)in_count, (long long)out_count, (long long)call->count,
                          (long long)need_in, (long long)need_out);
    }
    return DDL_OK;
}

/* One array of the v-forms and its offsets (packed ones are made when NULL); every block must lie in the tensor. */
static ddl_status ddl__check_array(ddl_group *g, ddl_dtype dtype, const int64_t *counts, const int64_t **offsets,
                                   int64_t *packed, int64_t have, const char *what, const char *which) {
    ddl_context *c = g->context;
    int64_t most = DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(dtype);
    if (counts == NULL) {
        return ddl__error(c, DDL_ERR_ARG, "%s: the counts for tensor `%s` are NULL", what, which);
    }
    int64_t at = 0;
    for (int32_t r = 0; r < g->size; r++) {
        packed[r] = at;
        int64_t offset = *offsets != NULL ? (*offsets)[r] : at;
        if (counts[r] < 0 || offset < 0 || (have >= 0 && (offset > have || counts[r] > have - offset))) {
            return ddl__error(c, DDL_ERR_ARG,
                              "%s: the part of rank %d has %lld elements at %lld, which is not inside tensor "
                              "`%s` of %lld elements",
                              what, r, (long long)counts[r], (long long)offset, which, (long long)have);
        }
        if (counts[r] > most - at || offset > most - counts[r]) {
            return ddl__too_large(g, what);
        }
        at += counts[r];
    }
    *offsets = *offsets != NULL ? *offsets : packed;
    return DDL_OK;
}

static ddl_status ddl__check_v(ddl_group *g, ddl__call *call, int64_t in_count, int64_t out_count, const char *what) {
    ddl_kind base = ddl__kind_base(call->kind);
    bool in_blocks = base == DDL_SCATTER || base == DDL_REDUCE_SCATTER || base == DDL_ALL_TO_ALL;
    bool uses = in_blocks ? ddl__uses_in(g, call) : ddl__uses_out(g, call);
    int64_t have = !uses ? -1 : in_blocks ? in_count : out_count;
    DDL__TRY(ddl__check_array(g, call->dtype, call->counts, &call->offsets, g->packed, have, what,
                              in_blocks ? "in" : "out"));
    if (base == DDL_ALL_TO_ALL) {
        return ddl__check_array(g, call->dtype, call->recv_counts, &call->recv_offsets, g->packed + g->size, out_count,
                                what, "out");
    }
    int64_t own = in_blocks ? out_count : in_count;
    if (own != call->counts[g->rank]) {
        return ddl__error(g->context, DDL_ERR_ARG,
                          "%s: tensor `%s` of rank %d has %lld elements, but counts[%d] is %lld", what,
                          in_blocks ? "out" : "in", g->rank, (long long)own, g->rank, (long long)call->counts[g->rank]);
    }
    return DDL_OK;
}

/* In place is: the smaller tensor is this rank's own part of the larger one, or both are the same. */
static ddl_status ddl__check_place(ddl_group *g, ddl__call *call, const char *what) {
    if (call->kind == DDL_BROADCAST) {
        call->in_place = true;
        return DDL_OK;
    }
    if (!ddl__uses_in(g, call) || !ddl__uses_out(g, call)) {
        return DDL_OK;
    }
    size_t size = ddl_dtype_bytes(call->dtype);
    ddl_kind base = ddl__kind_base(call->kind);
    int64_t own = (call->counts != NULL ? call->offsets[g->rank] : g->rank * call->count) * (int64_t)size;
    const char *in = call->in.data, *out = call->out.data;
    if (base == DDL_GATHER || base == DDL_ALL_GATHER) {
        out += own;
    } else if (base == DDL_SCATTER || base == DDL_REDUCE_SCATTER) {
        in += own;
    }
    bool contiguous = ddl__is_contiguous(&call->in) && ddl__is_contiguous(&call->out);
    bool same_view = base != DDL_GATHER && base != DDL_ALL_GATHER && base != DDL_SCATTER &&
                     base != DDL_REDUCE_SCATTER &&
                     memcmp(call->in.strides, call->out.strides, sizeof call->in.strides) == 0;
    call->in_place = in == out && (contiguous || same_view) && call->kind != DDL_ALL_TO_ALLV;
    if (!call->in_place && ddl__tensors_overlap(&call->in, &call->out)) {
        return ddl__error(
            g->context, DDL_ERR_ARG,
            "%s: `in` and `out` overlap; they must be apart, or in place as ddl.h says for this operation", what);
    }
    return DDL_OK;
}

/* In v-forms the elements of a rank differ from rank to rank; the arrays are alike but for all_to_allv. */
static uint64_t ddl__counts_hash(const ddl_group *g, const int64_t *counts) {
    uint64_t h = 0;
    for (int32_t i = 0; i < g->size; i++) {
        h = ddl__mix(h, (uint64_t)counts[i]);
    }
    return h;
}

static uint64_t ddl__call_hash(const ddl__call *call, const ddl__cached *cached) {
    uint64_t h = ddl__mix((uint64_t)call->kind, (uint64_t)call->dtype);
    h = ddl__mix(h, (uint64_t)(uint32_t)call->op << 32 | (uint32_t)call->root);
    h = ddl__mix(h, (uint64_t)call->count);
    h = ddl__mix(h, call->detail);
    h = ddl__mix(h, (uint64_t)(uint32_t)call->tensors << 8 | call->nature);
    h = ddl__mix(h, cached->algorithm_hash);
    return h != 0 ? h : 1; /* 0 means none */
}

/* What a caller asks for: a ddl_collective that copies no tensors, for that would take as long as 8 bytes need through
 * shared memory. What a kind does not use may be NULL; a broadcast has `in` alone. */
typedef struct ddl__asked {
    ddl_kind kind;
    ddl_op op;
    int32_t root;
    const ddl_tensor *in, *out;
    const int64_t *counts, *offsets, *recv_counts, *recv_offsets;
    int32_t tensors; /* of all_reduce_many, they, and a hash of them; else 0 */
    const ddl_tensor *list;
    uint64_t detail;
} ddl__asked;

static ddl__asked ddl__asked_of(const ddl_collective *d) {
    return (ddl__asked){.kind = d->kind, .op = d->op, .root = d->root, .in = &d->in, .out = &d->out,
                      .counts = d->counts, .offsets = d->offsets, .recv_counts = d->recv_counts,
                      .recv_offsets = d->recv_offsets};
}

/* Checks a collective and fills the call. Nothing has happened yet when it fails. */
static ddl_status ddl__call_make(ddl_group *g, const ddl__asked *d, ddl__call *out, const char *what) {
    ddl_context *c = g->context;
    *out = (ddl__call){.kind = d->kind, .op = d->op, .root = ddl__kind_rooted(d->kind) ? d->root : 0,
                       .tensors = d->tensors, .list = d->list, .detail = d->detail};
    if (d->kind <= DDL_KIND_NONE || d->kind > DDL_ALL_TO_ALLV) {
        return ddl__error(c, DDL_ERR_ARG, "%s: %d is no kind of collective", what, (int)d->kind);
    }
    if (out->root < 0 || out->root >= g->size) {
        return ddl__error(c, DDL_ERR_ARG, "%s: root %d is not in group \"%s\", whose ranks are 0 to %d", what,
                          out->root, g->name, g->size - 1);
    }
    if (out->kind == DDL_BARRIER) {
        out->dtype = DDL_U8;
        out->commutative = true;
        return DDL_OK;
    }
    out->in = *d->in;
    out->out = d->kind == DDL_BROADCAST ? *d->in : *d->out;
    bool uses_in = ddl__uses_in(g, out), uses_out = ddl__uses_out(g, out);
    if (uses_in) {
        DDL__TRY(ddl__tensor_check(c, d->in, what, "in"));
        if (d->kind == DDL_BROADCAST && g->rank != out->root) {
            DDL__TRY(ddl__tensor_check_output(c, d->in, what, "tensor"));
        }
    }
    if (uses_out) {
        DDL__TRY(ddl__tensor_check(c, d->out, what, "out"));
        DDL__TRY(ddl__tensor_check_output(c, d->out, what, "out"));
    }
    out->dtype = uses_in ? d->in->dtype : d->out->dtype;
    if (uses_in && uses_out && d->in->dtype != d->out->dtype) {
        return ddl__error(c, DDL_ERR_ARG, "%s: `in` is of type %s, `out` of type %s; they must be of one type", what,
                          ddl_dtype_name(d->in->dtype), ddl_dtype_name(d->out->dtype));
    }
    int64_t in_count = uses_in ? ddl_tensor_count(d->in) : 0, out_count = uses_out ? ddl_tensor_count(d->out) : 0;
    out->in_bytes = in_count * (int64_t)ddl_dtype_bytes(out->dtype);
    out->out_bytes = d->kind == DDL_BROADCAST ? out->in_bytes : out_count * (int64_t)ddl_dtype_bytes(out->dtype);
    if (ddl__kind_is_v(d->kind)) {
        out->counts = d->counts;
        out->offsets = d->offsets;
        out->recv_counts = d->kind == DDL_ALL_TO_ALLV ? d->recv_counts : NULL;
        out->recv_offsets = d->kind == DDL_ALL_TO_ALLV ? d->recv_offsets : NULL;
        DDL__TRY(ddl__check_v(g, out, in_count, out_count, what));
        out->detail = d->kind != DDL_ALL_TO_ALLV ? ddl__counts_hash(g, out->counts) : 0;
    } else {
        DDL__TRY(ddl__check_counts(g, out, in_count, out_count, what));
    }
    DDL__TRY(ddl__check_op(g, out, what));
    return ddl__check_place(g, out, what);
}

/* >>start */

static bool ddl__is_scaled(const ddl_group *g, const ddl__call *call, const ddl__user_op *user) {
    return user != NULL ? user->fn == NULL : ddl__averages_scaled(g, call);
}

/* The memory that steps work on: the caller's, or packed scratch for strided and for scaled input. */
static ddl_status ddl__op_buffers(ddl_context *c, ddl__op *op) {
    ddl__call *call = &op->call;
    bool uses_in = ddl__uses_in(op->group, call), uses_out = ddl__uses_out(op->group, call);
    bool scaled = ddl__is_scaled(op->group, call, op->user);
    bool takes = call->kind == DDL_BROADCAST && op->group->rank != call->root; /* its `in` is what it receives */
    bool pack_in = uses_in && !takes && call->in_bytes > 0 && (scaled || !ddl__is_contiguous(&call->in));
    bool pack_out = (uses_out || takes) && call->out_bytes > 0 && !ddl__is_contiguous(&call->out);
    op->base[DDL__IN] = uses_in ? call->in.data : NULL;
    op->base[DDL__OUT] = uses_out ? call->out.data : op->base[DDL__IN];
    op->base[DDL__TMP] = op->tmp;
    if (pack_in) {
        op->packed_in = ddl__scratch_get(c, (size_t)call->in_bytes);
        op->base[DDL__IN] = op->packed_in;
    }
    if (pack_out) {
        op->packed_out = ddl__scratch_get(c, (size_t)call->out_bytes);
        op->base[DDL__OUT] = op->packed_out;
    }
    if ((pack_in && op->packed_in == NULL) || (pack_out && op->packed_out == NULL)) {
        ddl__scratch_put(c, op->packed_in);
        ddl__scratch_put(c, op->packed_out);
        op->packed_in = op->packed_out = NULL;
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to pack a strided or scaled tensor");
    }
    if (pack_in) {
        ddl__pack(&call->in, op->packed_in, false);
    }
    if (pack_in && scaled) {
        size_t count = (size_t)call->in_bytes / ddl_dtype_bytes(call->dtype);
        double factor = op->user != NULL ? op->user->factor : ddl__average_scale(op->group->size);
        ddl__scale(op->packed_in, op->packed_in, count, call->dtype, factor);
    }
    if (call->kind == DDL_BROADCAST) {
        op->base[DDL__IN] = op->base[DDL__OUT] = pack_out ? op->packed_out : op->base[DDL__IN];
    } else if (pack_out && ddl__kind_is_v(call->kind)) {
        ddl__pack(&call->out, op->packed_out, false); /* what lies in the gaps between blocks stays */
    }
    return DDL_OK;
}

/* Strided or scaled: the plan works on copies, which are apart even when the tensors are one. */
static void ddl__call_settle_place(ddl_group *g, ddl__call *call) {
    bool strided = (ddl__uses_in(g, call) && !ddl__is_contiguous(&call->in)) ||
                   (ddl__uses_out(g, call) && !ddl__is_contiguous(&call->out));
    const ddl__user_op *user = ddl__user_op_of(g->context, call->op);
    if (call->kind != DDL_BROADCAST && (strided || ddl__is_scaled(g, call, user))) {
        call->in_place = false;
    }
}

static void ddl__op_launch(ddl_context *c, ddl_group *g, ddl__op *op) {
    op->sequence = ++g->sequence;
    g->signature = op->call.signature = DDL__CHECKS ? ddl__mix(g->signature, op->call.call_hash) : 0;
    op->asked_ns = 0;
    op->running = false;
    op->next = g->ops;
    g->ops = op;
    if (op->answers != NULL) {
        memset(op->answers, 0, (size_t)g->size * sizeof *op->answers);
    }
    if (DDL__CHECKS) {
        ddl__record_start(g, &op->call, op->cached->plan.algorithm, ddl__now_ns());
    }
    ddl__flow_caught_up(c, g);
    uint32_t sequence = op->sequence;
    if (DDL__CHECKS) {
        ddl__announced_check(c, g, op);
    }
    if (g->broken != DDL_OK || (DDL__CHECKS && !ddl__early_agrees(c, g, op))) {
        return;
    }
    ddl__op_run(c, op);
    if (g->early != NULL && g->broken == DDL_OK) {
        ddl__early_take(c, g, sequence);
    }
}

/* Makes a checked call an op of request r, with all steps at their beginning. On error nothing has changed. */
static ddl_status ddl__op_prepare(ddl_group *g, const ddl__call *call, ddl__cached *cached, ddl__user_op *user,
                                  ddl_request *r, ddl__op **out) {
    ddl_context *c = g->context;
    ddl__op *op = ddl__op_new(c, cached);
    if (op == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "no memory to run an operation on group \"%s\"", g->name);
    }
    op->group = g;
    op->request = r;
    op->cached = cached;
    op->call = *call;
    op->call.call_hash = DDL__CHECKS ? ddl__call_hash(call, cached) : 1;
    op->call.counts = cached->arrays; /* the caller's are its own again */
    op->call.offsets = op->call.recv_counts = op->call.recv_offsets = NULL; /* the plan has them */
    op->user = user;
    if (ddl__kind_reduces(call->kind)) {
        op->reduction = ddl__reduction_of(call->op, call->dtype, user);
    }
    ddl_status status = ddl__op_buffers(c, op);
    if (status < 0) {
        op->user = NULL;
        ddl__op_put(c, cached, op);
        return status;
    }
    cached->pins++;
    if (user != NULL) {
        user->users++;
    }
    r->op = op;
    r->state = DDL__REQUEST_ACTIVE;
    ddl__op_reset(op);
    *out = op;
    return DDL_OK;
}

/* Starts a checked call as request r. On error nothing was sent and the sequence number is not used up. */
static ddl_status ddl__call_run(ddl_group *g, const ddl__call *call, ddl__cached *cached, ddl__user_op *user,
                                ddl_request *r) {
    ddl__op *op;
    DDL__TRY(ddl__op_prepare(g, call, cached, user, r, &op));
    ddl__op_launch(g->context, g, op);
    return DDL_OK;
}

static ddl_status ddl__call_start(ddl_group *g, ddl__call *call, ddl_request *r) {
    ddl__cached *cached;
    ddl__call_settle_place(g, call);
    DDL__TRY(ddl__cached_get(g, call, &cached));
    return ddl__call_run(g, call, cached, ddl__user_op_of(g->context, call->op), r);
}

/* Sees what has come, once a millisecond at most: a rank that only sends small broadcasts would never learn that its
 * group is broken. */
static void ddl__glance(ddl_group *g) {
    ddl_context *c = g->context;
    uint64_t now = ddl__now_ns();
    if (!c->polling && now - g->glanced_ns > DDL__NS_PER_MS) {
        g->glanced_ns = now;
        ddl__poll(c, -1);
    }
}

/* Checks, makes a request and starts it. */
static ddl_status ddl__coll_begin(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out) {
    ddl__call call;
    DDL__TRY(ddl__group_usable(g, what));
    DDL__TRY(ddl__call_make(g, d, &call, what));
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__coll_ops, &r));
    ddl_status status = ddl__call_start(g, &call, r);
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    *out = r;
    return DDL_OK;
}

/* >>coll/fast */
/* coll: the short way of a blocking collective that a transport runs by itself: shared memory is done with a small one
 * before the long way, by plan, op and request, has begun. A call that is not over soon becomes an op after all, and
 * nothing is different from then on: deadline, stall report, death and mismatch are found by the long way. */

enum {
    DDL__FAST_LOOKS = 400,       /* in one go, while every rank can have a core: a microsecond or two */
    DDL__FAST_LOOKS_CROWDED = 24, /* while ranks share cores: the missing one may need this one */
    DDL__FAST_YIELDS = 64
};

/* The last call of a group that went this way. The same call again needs no check and no planning. */
typedef struct ddl__fast {
    uint32_t settings_version; /* of the group, when it was checked */
    ddl_kind kind; /* as the caller asked for it */
    ddl_op op;
    int32_t root;
    ddl_tensor in, out;
    ddl__call call;
    ddl__reduction reduction;
    ddl_native_call native;
    const char *algorithm;
} ddl__fast;

static bool ddl__same_shape(const ddl_tensor *a, const ddl_tensor *b) {
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0 && memcmp(a->strides, b->strides, sizeof a->strides) == 0;
}

static inline bool ddl__same_view(const ddl_tensor *a, const ddl_tensor *b) {
    return a->data == b->data && a->dtype == b->dtype && a->device == b->device && a->ndim == b->ndim &&
           (a->ndim == 1 ? a->shape[0] == b->shape[0] && a->strides[0] == b->strides[0] : ddl__same_shape(a, b));
}

static inline bool ddl__fast_knows(const ddl_group *g, const ddl__asked *d) {
    const ddl__fast *f = g->fast;
    return f != NULL && f->settings_version == g->settings_version && f->kind == d->kind && f->op == d->op &&
           f->root == d->root && (d->in == NULL || ddl__same_view(&f->in, d->in)) &&
           (d->out == NULL || ddl__same_view(&f->out, d->out));
}

/* Nothing on the group that a new call has to be compared with, or to wait for. */
static inline bool ddl__fast_quiet(const ddl_group *g) {
    return g->native.set != NULL && g->broken == DDL_OK && g->ops == NULL && g->early == NULL && g->doubt_ns == 0 &&
           g->wants == 0 && g->announced.sequence != g->sequence + 1 && !g->context->aborted;
}

/* What is done after the transport has done its part, or before, is left to the long way. */
static bool ddl__fast_serves(const ddl_group *g, const ddl__call *call, const ddl__cached *cached) {
    const ddl__plan *plan = &cached->plan;
    return plan->step_count == 1 && plan->steps[0].kind == DDL__NATIVE && call->op != DDL_AVG &&
           call->op < DDL__OPS_FIRST && (!ddl__uses_in(g, call) || ddl__is_contiguous(&call->in)) &&
           (!ddl__uses_out(g, call) || ddl__is_contiguous(&call->out));
}

/* Checks a call and keeps it. False: it goes the long way, which also says what is wrong with it. */
static bool ddl__fast_learn(ddl_group *g, const ddl__asked *d, const char *what) {
    ddl_context *c = g->context;
    ddl__cached *cached;
    ddl__call call;
    if (ddl__kind_is_v(d->kind) || ddl__call_make(g, d, &call, what) < 0) {
        return false;
    }
    ddl__call_settle_place(g, &call);
    if (ddl__cached_get(g, &call, &cached) < 0 || !ddl__fast_serves(g, &call, cached)) {
        return false;
    }
    ddl__fast *f = g->fast != NULL ? g->fast : ddl__alloc(&c->base, sizeof *f);
    if (f == NULL) {
        return false;
    }
    const ddl__step *s = &cached->plan.steps[0];
    bool takes = call.kind == DDL_BROADCAST;
    call.call_hash = ddl__call_hash(&call, cached);
    *f = (ddl__fast){.settings_version = g->settings_version, .kind = d->kind, .op = d->op, .root = d->root,
                     .call = call, .algorithm = cached->plan.algorithm};
    f->in = d->in != NULL ? *d->in : f->in;
    f->out = d->out != NULL ? *d->out : f->out;
    f->native = (ddl_native_call){.size = sizeof f->native,
                                  .kind = (int32_t)call.kind,
                                  .root = call.root,
                                  .element_bytes = (int32_t)ddl_dtype_bytes(call.dtype),
                                  .in = ddl__uses_in(g, &call) ? call.in.data : NULL,
                                  .out = takes ? call.in.data : ddl__uses_out(g, &call) ? call.out.data : NULL,
                                  .bytes = (uint64_t)s->bytes};
    if (ddl__kind_reduces(call.kind)) {
        f->reduction = ddl__reduction_of(call.op, call.dtype, NULL);
        f->native.reduce = ddl__native_reduce;
        f->native.reduce_arg = &f->reduction;
    }
    g->fast = f;
    return true;
}

/* It takes longer, or it failed: an op is made that goes on from there. `begun` is what native_start said. */
static ddl_status ddl__fast_adopt(ddl_group *g, ddl__fast *f, ddl_status begun, void *native, const char *what) {
    ddl_context *c = g->context;
    ddl__cached *cached;
    ddl__op *op;
    ddl_request *r = NULL;
    ddl_status status = ddl__cached_get(g, &f->call, &cached);
    status = status == DDL_OK ? ddl__request_new(g, &ddl__coll_ops, &r) : status;
    status = status == DDL_OK ? ddl__op_prepare(g, &f->call, cached, NULL, r, &op) : status;
    if (status < 0) {
        if (r != NULL) {
            ddl__request_release(r);
        }
        if (native != NULL) {
            g->native.table->native_cancel(g->native.self, g->native.set, native);
        }
        ddl__break_everywhere(c, g, status, "rank %d has no memory to go on with %s", g->rank, what);
        return ddl__group_usable(g, what);
    }
    op->sequence = g->sequence;
    op->call.signature = g->signature;
    op->asked_ns = 0;
    op->running = false;
    op->next = g->ops;
    g->ops = op;
    op->ready_count = op->natives_left = 0; /* its step has begun: later calls need not wait for that */
    if (op->answers != NULL) {
        memset(op->answers, 0, (size_t)g->size * sizeof *op->answers);
    }
    ddl__native_list(c, op, 0, begun, native);
    c->doing = what;
    ddl__wait_requests(c, &r, 1, false);
    status = ddl__request_report(&r, NULL);
    c->doing = NULL;
    return status;
}

/* Waits a little; *out_end_ns is then about now. The lock is kept: nobody else knows of the operation yet. */
static ddl_status ddl__fast_wait(ddl_group *g, void *native, uint64_t *out_end_ns) {
    ddl_context *c = g->context;
    bool crowded = c->local_ranks > c->cores;
    int32_t looks = crowded ? DDL__FAST_LOOKS_CROWDED : DDL__FAST_LOOKS, rank = -1;
    *out_end_ns = g->fast_ns; /* over in one go: the clock costs more than it would tell */
    for (int32_t round = 0;; round++) {
        ddl_status status = g->native.table->native_test(g->native.self, g->native.set, native, looks, &rank);
        bool wanted = atomic_load_explicit(&c->lock_waiters, memory_order_relaxed) > 0;
        if (status != DDL_IN_PROGRESS || round == DDL__FAST_YIELDS || c->busy_waits > 0 || wanted) {
            return status;
        }
        ddl__yield(c, false);
        *out_end_ns = ddl__about_ns(c);
    }
}

/* What need not be known before the others see the arrival is done while their answer is on its way. */
static ddl_status ddl__fast_run(ddl_group *g, ddl__fast *f, const char *what) {
    ddl_context *c = g->context;
    void *native = NULL;
    uint64_t end_ns;
    g->sequence++;
    g->signature = DDL__CHECKS ? ddl__mix(g->signature, f->call.call_hash) : 0;
    f->native.signature = f->call.signature = g->signature;
    f->native.sequence = ++g->native.sequence;
    ddl_status begun = g->native.table->native_start(g->native.self, g->native.set, &f->native, &native);
    g->fast_ns = ddl__about_ns(c);
    if (DDL__CHECKS) {
        ddl__record_start(g, &f->call, f->algorithm, g->fast_ns);
    }
    if (begun != DDL_OK || ddl__fast_wait(g, native, &end_ns) != DDL_OK) {
        return ddl__fast_adopt(g, f, begun, begun == DDL_OK ? native : NULL, what);
    }
    if (DDL__CHECKS) {
        ddl__record_end(g, g->sequence, DDL_OK, end_ns);
    }
    c->stats.ops_started++;
    c->stats.ops_completed++;
    return DDL_OK;
}

/* Goes the short way when that is possible. A rank that only sends would never learn that its group is broken: what has
 * come is looked at once a millisecond, by the clock of the call before this one. */
static bool ddl__fast_try(ddl_group *g, const ddl__asked *d, const char *what, ddl_status *out_status) {
    ddl_context *c = g->context;
    if (!ddl__fast_quiet(g)) {
        return false;
    }
    if (!c->polling && g->fast_ns - DDL__MIN(g->glanced_ns, g->fast_ns) > DDL__NS_PER_MS) {
        ddl__glance(g);
        if (!ddl__fast_quiet(g)) {
            return false;
        }
    }
    if (!ddl__fast_knows(g, d) && !ddl__fast_learn(g, d, what)) {
        return false;
    }
    *out_status = ddl__fast_run(g, g->fast, what);
    return true;
}

/* A public call: begins, and waits when it is blocking (out_request NULL). */
static ddl_status ddl__coll_call(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out_request) {
    if (out_request != NULL) {
        *out_request = NULL;
    }
    DDL__TRY(ddl__enter_group(g, what));
    ddl_context *c = g->context;
    ddl_request *r = NULL;
    ddl_status status;
    if (out_request == NULL && ddl__fast_try(g, d, what, &status)) {
        ddl__unlock(c);
        return status;
    }
    c->doing = what;
    ddl__glance(g);
    status = ddl__coll_begin(g, d, what, &r);
    if (status == DDL_OK && out_request != NULL) {
        *out_request = r;
    } else if (status == DDL_OK) {
        ddl__wait_requests(c, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

static ddl_status ddl__coll_icall(ddl_group *g, const ddl__asked *d, const char *what, ddl_request **out_request) {
    return out_request != NULL ? ddl__coll_call(g, d, what, out_request) : ddl__refuse_group(g, what, "out_request");
}

/* >>coll/coll */
/* coll, second part: the public collectives. Each says what it asks for; the rest is alike for all. */

DDL_API ddl_status ddl_barrier(ddl_group *group) {
    ddl__asked ask = {.kind = DDL_BARRIER};
    return ddl__coll_call(group, &ask, "ddl_barrier", NULL);
}

DDL_API ddl_status ddl_ibarrier(ddl_group *group, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_BARRIER};
    return ddl__coll_icall(group, &ask, "ddl_ibarrier", out_request);
}

DDL_API ddl_status ddl_broadcast(ddl_group *group, ddl_tensor tensor, int32_t root) {
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &tensor, .root = root};
    return ddl__coll_call(group, &ask, "ddl_broadcast", NULL);
}

DDL_API ddl_status ddl_ibroadcast(ddl_group *group, ddl_tensor tensor, int32_t root, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &tensor, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_ibroadcast", out_request);
}

DDL_API ddl_status ddl_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root) {
    ddl__asked ask = {.kind = DDL_REDUCE, .in = &in, .out = &out, .op = op, .root = root};
    return ddl__coll_call(group, &ask, "ddl_reduce", NULL);
}

DDL_API ddl_status ddl_ireduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, int32_t root,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_REDUCE, .in = &in, .out = &out, .op = op, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_ireduce", out_request);
}

DDL_API ddl_status ddl_all_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_all_reduce", NULL);
}

DDL_API ddl_status ddl_iall_reduce(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                   ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iall_reduce", out_request);
}

DDL_API ddl_status ddl_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root) {
    ddl__asked ask = {.kind = DDL_GATHER, .in = &in, .out = &out, .root = root};
    return ddl__coll_call(group, &ask, "ddl_gather", NULL);
}

DDL_API ddl_status ddl_igather(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_GATHER, .in = &in, .out = &out, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_igather", out_request);
}

DDL_API ddl_status ddl_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root) {
    ddl__asked ask = {.kind = DDL_SCATTER, .in = &in, .out = &out, .root = root};
    return ddl__coll_call(group, &ask, "ddl_scatter", NULL);
}

DDL_API ddl_status ddl_iscatter(ddl_group *group, ddl_tensor in, ddl_tensor out, int32_t root,
                                ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_SCATTER, .in = &in, .out = &out, .root = root};
    return ddl__coll_icall(group, &ask, "ddl_iscatter", out_request);
}

DDL_API ddl_status ddl_all_gather(ddl_group *group, ddl_tensor in, ddl_tensor out) {
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &out};
    return ddl__coll_call(group, &ask, "ddl_all_gather", NULL);
}

DDL_API ddl_status ddl_iall_gather(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &out};
    return ddl__coll_icall(group, &ask, "ddl_iall_gather", out_request);
}

DDL_API ddl_status ddl_reduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTER, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_reduce_scatter", NULL);
}

DDL_API ddl_status ddl_ireduce_scatter(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                                       ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTER, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_ireduce_scatter", out_request);
}

DDL_API ddl_status ddl_all_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALL, .in = &in, .out = &out};
    return ddl__coll_call(group, &ask, "ddl_all_to_all", NULL);
}

DDL_API ddl_status ddl_iall_to_all(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALL, .in = &in, .out = &out};
    return ddl__coll_icall(group, &ask, "ddl_iall_to_all", out_request);
}

DDL_API ddl_status ddl_scan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_SCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_scan", NULL);
}

DDL_API ddl_status ddl_iscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_SCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iscan", out_request);
}

DDL_API ddl_status ddl_exscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op) {
    ddl__asked ask = {.kind = DDL_EXSCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_call(group, &ask, "ddl_exscan", NULL);
}

DDL_API ddl_status ddl_iexscan(ddl_group *group, ddl_tensor in, ddl_tensor out, ddl_op op,
                               ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_EXSCAN, .in = &in, .out = &out, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_iexscan", out_request);
}

DDL_API ddl_status ddl_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                               const int64_t *offsets, int32_t root) {
    ddl__asked ask = {.kind = DDL_GATHERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets,
                        .root = root};
    return ddl__coll_call(group, &ask, "ddl_gatherv", NULL);
}

DDL_API ddl_status ddl_igatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_GATHERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets,
                        .root = root};
    return ddl__coll_icall(group, &ask, "ddl_igatherv", out_request);
}

DDL_API ddl_status ddl_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                const int64_t *offsets, int32_t root) {
    ddl__asked ask = {.kind = DDL_SCATTERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets,
                        .root = root};
    return ddl__coll_call(group, &ask, "ddl_scatterv", NULL);
}

DDL_API ddl_status ddl_iscatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                 const int64_t *offsets, int32_t root, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_SCATTERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets,
                        .root = root};
    return ddl__coll_icall(group, &ask, "ddl_iscatterv", out_request);
}

DDL_API ddl_status ddl_all_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                   const int64_t *offsets) {
    ddl__asked ask = {.kind = DDL_ALL_GATHERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets};
    return ddl__coll_call(group, &ask, "ddl_all_gatherv", NULL);
}

DDL_API ddl_status ddl_iall_gatherv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                    const int64_t *offsets, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_GATHERV, .in = &in, .out = &out, .counts = counts, .offsets = offsets};
    return ddl__coll_icall(group, &ask, "ddl_iall_gatherv", out_request);
}

DDL_API ddl_status ddl_reduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                       ddl_op op) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTERV, .in = &in, .out = &out, .counts = counts, .op = op};
    return ddl__coll_call(group, &ask, "ddl_reduce_scatterv", NULL);
}

DDL_API ddl_status ddl_ireduce_scatterv(ddl_group *group, ddl_tensor in, ddl_tensor out, const int64_t *counts,
                                        ddl_op op, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_REDUCE_SCATTERV, .in = &in, .out = &out, .counts = counts, .op = op};
    return ddl__coll_icall(group, &ask, "ddl_ireduce_scatterv", out_request);
}

DDL_API ddl_status ddl_all_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                   const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                   const int64_t *recv_offsets) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALLV, .in = &in, .out = &out, .counts = send_counts,
                        .offsets = send_offsets, .recv_counts = recv_counts, .recv_offsets = recv_offsets};
    return ddl__coll_call(group, &ask, "ddl_all_to_allv", NULL);
}

DDL_API ddl_status ddl_iall_to_allv(ddl_group *group, ddl_tensor in, const int64_t *send_counts,
                                    const int64_t *send_offsets, ddl_tensor out, const int64_t *recv_counts,
                                    const int64_t *recv_offsets, ddl_request **out_request) {
    ddl__asked ask = {.kind = DDL_ALL_TO_ALLV, .in = &in, .out = &out, .counts = send_counts,
                        .offsets = send_offsets, .recv_counts = recv_counts, .recv_offsets = recv_offsets};
    return ddl__coll_icall(group, &ask, "ddl_iall_to_allv", out_request);
}

/* >>scalar */

DDL_API ddl_status ddl_all_reduce_scalar(ddl_group *group, double *value, ddl_op op) {
    if (value == NULL) {
        return ddl__refuse_group(group, "ddl_all_reduce_scalar", "value");
    }
    ddl_tensor t = ddl_tensor_1d(value, DDL_F64, 1);
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &t, .out = &t, .op = op};
    return ddl__coll_call(group, &ask, "ddl_all_reduce_scalar", NULL);
}

/* >>ops */

/* The next id; after 2^31 of them it begins anew, past those that are still there. */
static ddl_op ddl__op_id(ddl_context *c) {
    ddl_op id;
    do {
        id = DDL__OPS_FIRST + (ddl_op)(c->ops->created++ % (uint32_t)(INT32_MAX - DDL__OPS_FIRST));
    } while (ddl__user_op_of(c, id) != NULL);
    return id;
}

static ddl_status ddl__op_add(ddl_context *c, ddl__user_op op, ddl_op *out_op) {
    DDL__TRY(ddl__enter(c));
    ddl_status status = DDL_OK;
    ddl__user_op *made = c->ops->count < DDL__OPS_MAX ? ddl__alloc(&c->base, sizeof *made) : NULL;
    if (made != NULL) {
        *made = op;
        made->id = ddl__op_id(c);
        made->next = c->ops->first;
        c->ops->first = made;
        c->ops->count++;
        *out_op = made->id;
    } else if (c->ops->count == DDL__OPS_MAX) {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_op_create: there are %d ops already; free some", DDL__OPS_MAX);
    } else {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_op_create: no memory for an op");
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_op_create(ddl_context *context, ddl_op_fn fn, void *user, int commutative, ddl_op *out_op) {
    if (fn == NULL || out_op == NULL) {
        return ddl__refuse(context, "ddl_op_create", fn == NULL ? "fn" : "out_op");
    }
    return ddl__op_add(context, (ddl__user_op){.commutative = commutative != 0, .fn = fn, .user = user}, out_op);
}

DDL_API ddl_status ddl_op_create_scaled_sum(ddl_context *context, double factor, ddl_op *out_op) {
    if (out_op == NULL) {
        return ddl__refuse(context, "ddl_op_create_scaled_sum", "out_op");
    }
    return ddl__op_add(context, (ddl__user_op){.commutative = true, .factor = factor}, out_op);
}

DDL_API ddl_status ddl_op_free(ddl_context *context, ddl_op op) {
    DDL__TRY(ddl__enter(context));
    ddl__user_op *user = ddl__user_op_of(context, op);
    ddl_status status = DDL_OK;
    if (user == NULL) {
        status = ddl__error(context, DDL_ERR_ARG, "ddl_op_free: op %d was not created, or was freed before", op);
    } else {
        user->freed = true;
        context->ops->count--;
        if (user->users == 0) {
            ddl__user_op_release(context, user);
        }
    }
    ddl__unlock(context);
    return status;
}

/* >>coll/many */
/* coll, third part: several tensors as one operation, persistent operations, estimates. */

enum { DDL__DTYPES_USED = DDL_I64_I64 + 1 };

/* An all_reduce of many tensors: those of one type are packed together and reduced at once. */
typedef struct ddl__many {
    int32_t count;
    uint64_t detail; /* hash of the types and lengths of all */
    ddl_request *parts[DDL__DTYPES_USED];
    char *packed[DDL__DTYPES_USED];
    ddl_tensor tensors[];
} ddl__many;

/* Copies tensors of one type to the packed memory or back; returns the elements. */
static int64_t ddl__many_pack(const ddl__many *m, ddl_dtype dtype, char *packed, bool unpack) {
    int64_t total = 0;
    for (int32_t i = 0; i < m->count; i++) {
        if (m->tensors[i].dtype == dtype) {
            int64_t count = ddl_tensor_count(&m->tensors[i]);
            char *at = packed != NULL ? packed + total * (int64_t)ddl_dtype_bytes(dtype) : NULL;
            if (at != NULL) {
                ddl__pack(&m->tensors[i], at, unpack);
            }
            total += count;
        }
    }
    return total;
}

static void ddl__many_free(ddl_context *c, ddl_request *r) {
    ddl__many *m = r->kept;
    for (int32_t d = 0; d < DDL__DTYPES_USED; d++) {
        ddl__scratch_put(c, m->packed[d]);
        m->packed[d] = NULL;
        if (m->parts[d] != NULL) {
            m->parts[d]->parent = NULL;
            ddl__request_release(m->parts[d]);
            m->parts[d] = NULL;
        }
    }
}

/* All parts are done: the tensors get their results, unless one part failed. */
static void ddl__many_done(ddl_context *c, ddl_request *r) {
    ddl__many *m = r->kept;
    ddl_request *failed = NULL;
    for (int32_t d = 0; d < DDL__DTYPES_USED; d++) {
        if (m->parts[d] != NULL && m->parts[d]->status < 0) {
            failed = m->parts[d];
        }
    }
    (void)c;
    for (int32_t d = 0; d < DDL__DTYPES_USED && failed == NULL; d++) {
        if (m->packed[d] != NULL) {
            ddl__many_pack(m, (ddl_dtype)d, m->packed[d], true);
        }
    }
    ddl_status status = failed != NULL ? failed->status : DDL_OK;
    if (failed != NULL) {
        ddl__request_fail(r, status, "%s", failed->why != NULL ? failed->why : ddl_status_text(status));
    } else {
        ddl__request_done(r, DDL_OK);
    }
}

static ddl_request *ddl__many_pending(ddl_request *r) {
    ddl__many *m = r->kept;
    for (int32_t d = 0; d < DDL__DTYPES_USED; d++) {
        if (ddl__is_pending(m->parts[d])) {
            return m->parts[d];
        }
    }
    return NULL;
}

static void ddl__many_abandon(ddl_context *c, ddl_request *r) {
    for (ddl_request *part = ddl__many_pending(r); part != NULL; part = ddl__many_pending(r)) {
        part->parent = NULL;
        part->ops->abandon(c, part);
        if (ddl__is_pending(part)) {
            ddl__request_done(part, DDL_ERR_TIMEOUT);
        }
    }
}

static void ddl__many_explain(ddl_context *c, ddl_request *r, ddl__text *text) {
    ddl_request *part = ddl__many_pending(r);
    if (part != NULL) {
        part->ops->explain(c, part, text);
    }
}

static void ddl__many_tick(ddl_context *c, ddl_request *r, uint64_t waited) {
    ddl_request *part = ddl__many_pending(r);
    if (part != NULL) {
        part->ops->tick(c, part, waited);
    }
}

static int32_t ddl__many_expect(ddl_context *c, ddl_request *r) {
    ddl_request *part = ddl__many_pending(r);
    return part != NULL ? part->ops->expect(c, part) : -1;
}

static void ddl__many_release(ddl_context *c, ddl_request *r) { ddl__many_free(c, r); }

static const ddl__request_ops ddl__many_ops = {ddl__many_abandon, ddl__many_explain, ddl__many_tick, ddl__many_expect,
                                               ddl__many_release};

/* Starts the part of one type. */
static ddl_status ddl__many_part(ddl_context *c, ddl_request *r, ddl_dtype dtype, int64_t elements, ddl_op op) {
    ddl__many *m = r->kept;
    size_t bytes = (size_t)elements * ddl_dtype_bytes(dtype);
    m->packed[dtype] = ddl__scratch_get(c, bytes);
    if (m->packed[dtype] == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_all_reduce_many: no memory to pack %zu bytes", bytes);
    }
    ddl__many_pack(m, dtype, m->packed[dtype], false);
    ddl_tensor t = ddl_tensor_1d(m->packed[dtype], dtype, elements);
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &t, .out = &t, .op = op,
                      .tensors = m->count, .list = m->tensors, .detail = m->detail};
    DDL__TRY(ddl__coll_begin(r->group, &ask, "ddl_all_reduce_many", &m->parts[dtype]));
    if (ddl__is_pending(m->parts[dtype])) {
        m->parts[dtype]->parent = r;
        r->parts++;
    }
    return DDL_OK;
}

/* Types and lengths, in the order of the list. Every part carries it, so that lists that differ meet in the first. */
static uint64_t ddl__many_hash(const ddl_tensor *tensors, int32_t count) {
    uint64_t h = (uint64_t)count;
    for (int32_t i = 0; i < count; i++) {
        h = ddl__mix(ddl__mix(h, (uint64_t)tensors[i].dtype), (uint64_t)ddl_tensor_count(&tensors[i]));
    }
    return h;
}

static int ddl__tensors_by_place(const void *a, const void *b) {
    const char *low[2], *high;
    ddl__tensor_extent(*(const ddl_tensor *const *)a, &low[0], &high);
    ddl__tensor_extent(*(const ddl_tensor *const *)b, &low[1], &high);
    return low[0] < low[1] ? -1 : low[0] > low[1];
}

/* Two tensors of one list may lie between each other's elements, but each element has one result. */
static ddl_status ddl__many_check_apart(ddl_group *g, const ddl_tensor *tensors, int32_t count, const char *what) {
    ddl_context *c = g->context;
    const ddl_tensor **sorted = ddl__scratch_get(c, (size_t)count * sizeof *sorted + 1);
    if (sorted == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    }
    for (int32_t i = 0; i < count; i++) {
        sorted[i] = &tensors[i];
    }
    qsort(sorted, (size_t)count, sizeof *sorted, ddl__tensors_by_place);
    ddl_status status = DDL_OK;
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        for (int32_t j = i + 1; j < count && ddl__tensors_overlap(sorted[i], sorted[j]) && status == DDL_OK; j++) {
            bool plain = ddl__is_contiguous(sorted[j]);
            if (plain || ddl__is_contiguous(sorted[i])) {
                bool touch = ddl__tensor_touches(sorted[plain ? i : j], sorted[plain ? j : i]);
                status = touch ? ddl__error(c, DDL_ERR_ARG, "%s: tensors %d and %d of the list overlap; each must have "
                                                            "memory of its own", what, (int)(sorted[i] - tensors),
                                            (int)(sorted[j] - tensors))
                               : DDL_OK;
            }
        }
    }
    ddl__scratch_put(c, sorted);
    return status;
}

/* Each tensor, and the elements of all of one type together. */
static ddl_status ddl__many_check(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op, const char *what) {
    int64_t elements[DDL__DTYPES_USED] = {0};
    for (int32_t i = 0; i < count; i++) {
        const ddl_tensor *t = &tensors[i];
        DDL__TRY(ddl__tensor_check(g->context, t, what, "tensors"));
        DDL__TRY(ddl__tensor_check_output(g->context, t, what, "tensors"));
        ddl__call call = {.kind = DDL_ALL_REDUCE, .dtype = t->dtype, .op = op};
        DDL__TRY(ddl__check_op(g, &call, what));
        int64_t most = DDL__WHOLE_MAX / (int64_t)ddl_dtype_bytes(t->dtype) / g->size;
        if (ddl_tensor_count(t) > most - elements[t->dtype]) {
            return ddl__too_large(g, what);
        }
        elements[t->dtype] += ddl_tensor_count(t);
    }
    return ddl__many_check_apart(g, tensors, count, what);
}

static ddl_status ddl__many_begin(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op,
                                  const char *what, ddl_request **out) {
    ddl_context *c = g->context;
    DDL__TRY(ddl__group_usable(g, what));
    DDL__TRY(ddl__many_check(g, tensors, count, op, what));
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__many_ops, &r));
    ddl__many *m = ddl__alloc(&c->base, sizeof *m + (size_t)count * sizeof *tensors);
    if (m == NULL) {
        ddl__request_release(r);
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", what);
    }
    r->kept = m;
    r->parts_done = ddl__many_done;
    m->count = count;
    m->detail = ddl__many_hash(tensors, count);
    if (count > 0) {
        memcpy(m->tensors, tensors, (size_t)count * sizeof *tensors);
    }
    r->parts = 1; /* held until all are started */
    ddl_status status = DDL_OK;
    bool any = false;
    for (int32_t d = 1; d < DDL__DTYPES_USED && status == DDL_OK; d++) {
        int64_t elements = ddl__many_pack(m, (ddl_dtype)d, NULL, false);
        if (elements > 0) {
            any = true;
            status = ddl__many_part(c, r, (ddl_dtype)d, elements, op);
        }
    }
    if (status == DDL_OK && !any) { /* nothing to reduce is still a call that others must make too */
        status = ddl__many_part(c, r, DDL_U8, 0, DDL_MAX);
    }
    if (status < 0) {
        ddl__many_abandon(c, r);
        ddl__request_release(r);
        return status;
    }
    if (--r->parts == 0) {
        ddl__many_done(c, r);
    }
    *out = r;
    return DDL_OK;
}

static ddl_status ddl__many_call(ddl_group *g, const ddl_tensor *tensors, int32_t count, ddl_op op,
                                 ddl_request **out_request) {
    const char *what = out_request != NULL ? "ddl_iall_reduce_many" : "ddl_all_reduce_many";
    if (out_request != NULL) {
        *out_request = NULL;
    }
    DDL__TRY(ddl__enter_group(g, what));
    ddl_context *c = g->context;
    ddl_request *r = NULL;
    ddl__glance(g);
    ddl_status status = count < 0 || (count > 0 && tensors == NULL)
                            ? ddl__error(c, DDL_ERR_ARG, "%s: %d tensors at NULL are not possible", what, count)
                            : ddl__many_begin(g, tensors, count, op, what, &r);
    if (status == DDL_OK && out_request != NULL) {
        *out_request = r;
    } else if (status == DDL_OK) {
        ddl__wait_requests(c, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_all_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op) {
    return ddl__many_call(group, tensors, tensor_count, op, NULL);
}

DDL_API ddl_status ddl_iall_reduce_many(ddl_group *group, const ddl_tensor *tensors, int32_t tensor_count, ddl_op op,
                                        ddl_request **out_request) {
    return out_request == NULL ? ddl__refuse_group(group, "ddl_iall_reduce_many", "out_request")
                               : ddl__many_call(group, tensors, tensor_count, op, out_request);
}

/* >>persistent */

/* A checked call with arrays of its own, and what it holds until ddl_request_free: the plan and the op of the user. */
typedef struct ddl__kept {
    ddl__call call;
    ddl__cached *cached;
    ddl__user_op *user;
    int64_t arrays[];
} ddl__kept;

static ddl__kept *ddl__keep(ddl_group *g, const ddl__call *call) {
    size_t n = (size_t)g->size;
    ddl__kept *k = ddl__alloc(&g->context->base, sizeof *k + 4 * n * sizeof(int64_t));
    if (k == NULL) {
        return NULL;
    }
    k->call = *call;
    const int64_t **arrays[4] = {&k->call.counts, &k->call.offsets, &k->call.recv_counts, &k->call.recv_offsets};
    for (int32_t i = 0; i < ddl__call_arrays(call); i++) {
        memcpy(k->arrays + (size_t)i * n, *arrays[i], n * sizeof(int64_t));
        *arrays[i] = k->arrays + (size_t)i * n;
    }
    k->user = ddl__user_op_of(g->context, call->op);
    if (k->user != NULL) {
        k->user->users++;
    }
    return k;
}

static void ddl__persistent_unpin(ddl__kept *k) {
    if (k->cached != NULL) {
        k->cached->pins--;
        k->cached->held--;
        k->cached = NULL;
    }
}

/* Holds the plan and an op that is ready to run; again only after ddl_group_set has changed how to plan. */
static ddl_status ddl__persistent_pin(ddl_group *g, ddl__kept *k) {
    ddl__cached *cached;
    if (k->cached != NULL && k->cached->settings_version == g->settings_version) {
        return DDL_OK;
    }
    DDL__TRY(ddl__cached_get(g, &k->call, &cached));
    while (cached->spares <= cached->held) {
        ddl__op *op = ddl__op_make(g->context, cached);
        if (op == NULL) {
            return ddl__error(g->context, DDL_ERR_NOMEM, "no memory to plan an operation on group \"%s\"", g->name);
        }
        cached->held++;
        ddl__op_put(g->context, cached, op);
        cached->held--;
    }
    ddl__persistent_unpin(k);
    cached->pins++;
    cached->held++;
    k->cached = cached;
    return DDL_OK;
}

static void ddl__persistent_release(ddl_context *c, ddl_request *r) {
    ddl__kept *k = r->kept;
    ddl__persistent_unpin(k);
    if (k->user != NULL) {
        ddl__user_op_drop(c, k->user);
    }
}

static const ddl__request_ops ddl__persistent_ops = {ddl__coll_abandon, ddl__coll_explain, ddl__coll_tick,
                                                     ddl__coll_expect, ddl__persistent_release};

static ddl_status ddl__persistent_make(ddl_group *g, const ddl_collective *d, ddl_request **out) {
    ddl_context *c = g->context;
    ddl__call call;
    ddl__asked ask = ddl__asked_of(d);
    DDL__TRY(ddl__group_usable(g, "ddl_collective_init"));
    DDL__TRY(ddl__call_make(g, &ask, &call, "ddl_collective_init"));
    ddl__call_settle_place(g, &call);
    ddl_request *r;
    DDL__TRY(ddl__request_new(g, &ddl__persistent_ops, &r));
    r->kept = ddl__keep(g, &call);
    ddl_status status = r->kept != NULL ? ddl__persistent_pin(g, r->kept)
                                        : ddl__error(c, DDL_ERR_NOMEM, "ddl_collective_init: no memory");
    if (status < 0) {
        ddl__request_release(r);
        return status;
    }
    r->persistent = true;
    r->state = DDL__REQUEST_IDLE;
    *out = r;
    return DDL_OK;
}

DDL_API ddl_status ddl_collective_init(ddl_group *group, const ddl_collective *collective, ddl_request **out_request) {
    if (out_request != NULL) {
        *out_request = NULL;
    }
    if (collective == NULL || out_request == NULL) {
        return ddl__refuse_group(group, "ddl_collective_init", collective == NULL ? "collective" : "out_request");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_collective_init"));
    ddl_status status = ddl__persistent_make(group, collective, out_request);
    ddl__unlock(group->context);
    return status;
}

static ddl_status ddl__persistent_start(ddl_context *c, ddl_request *r) {
    if (!r->persistent || r->state != DDL__REQUEST_IDLE) {
        return ddl__error(c, DDL_ERR_STATE,
                          r->persistent ? "ddl_start: the operation is still running; wait for it first"
                                        : "ddl_start: the request is not of ddl_collective_init");
    }
    ddl__kept *k = r->kept;
    ddl__glance(r->group);
    DDL__TRY(ddl__group_usable(r->group, "ddl_start"));
    DDL__TRY(ddl__persistent_pin(r->group, k));
    ddl__free(&c->base, r->why);
    r->why = NULL;
    r->status = DDL_OK;
    return ddl__call_run(r->group, &k->call, k->cached, k->user, r);
}

DDL_API ddl_status ddl_start(ddl_request *request) {
    ddl_request *list[1] = {request};
    ddl_context *c;
    if (request == NULL) {
        return DDL_ERR_ARG;
    }
    DDL__TRY(ddl__enter_requests(list, 1, "ddl_start", &c));
    ddl_status status = ddl__persistent_start(c, request);
    ddl__unlock(c);
    return status;
}

/* >>estimate */

DDL_API ddl_status ddl_estimate(ddl_group *group, const ddl_collective *collective, ddl_estimate_info *out_estimate) {
    if (collective == NULL || out_estimate == NULL) {
        return ddl__refuse_group(group, "ddl_estimate", collective == NULL ? "collective" : "out_estimate");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_estimate"));
    ddl__call call;
    ddl__asked ask = ddl__asked_of(collective);
    ddl_status status = ddl__call_make(group, &ask, &call, "ddl_estimate");
    if (status == DDL_OK) {
        ddl__plan_args args = ddl__call_args(group, &call);
        ddl__choice choice = ddl__tune_choose(&group->tuning, &args);
        bool far = group->context->host_count > 1;
        ddl_context *c = group->context;
        int32_t peer = group->ranks[(group->rank + 1) % group->size];
        *out_estimate = (ddl_estimate_info){
            .seconds = choice.seconds,
            .algorithm = choice.algo->name,
            .transport = c->links[peer].endpoint != NULL ? c->links[peer].endpoint->plugin->name : "none",
            .latency_s = group->tuning.model.latency_s[far],
            .seconds_per_byte = group->tuning.model.s_per_byte[far],
        };
    }
    ddl__unlock(group->context);
    return status;
}

/* >>coll/groups */
/* coll, fourth part: making groups. Members agree on the id through the group they come from: the member with the
 * lowest rank gives it out, everybody answers, and nobody uses the group before all have it. */

enum { DDL__TAG_GROUP = INT32_MIN, DDL__FORMATION_BYTES = 20 };

/* What the leader sends, and what a member answers. */
typedef struct ddl__formation {
    uint64_t fingerprint;
    uint32_t id;
    int32_t verdict; /* a ddl_status */
    int32_t native;  /* 1: a transport can run collectives of the new group by itself; at the end: on all ranks */
} ddl__formation;

/* On the wire: fingerprint u64, id u32, verdict u32, native u32. */
static void ddl__formation_write(const ddl__formation *f, uint8_t out[DDL__FORMATION_BYTES]) {
    ddl__writer w = ddl__writer_of(out, DDL__FORMATION_BYTES);
    ddl__put_u64(&w, f->fingerprint);
    ddl__put_u32(&w, f->id);
    ddl__put_u32(&w, (uint32_t)f->verdict);
    ddl__put_u32(&w, (uint32_t)f->native);
}

static ddl__formation ddl__formation_read(const uint8_t in[DDL__FORMATION_BYTES]) {
    ddl__reader r = ddl__reader_of(in, DDL__FORMATION_BYTES);
    ddl__formation f = {.fingerprint = ddl__get_u64(&r)};
    f.id = ddl__get_u32(&r);
    f.verdict = (int32_t)ddl__get_u32(&r);
    f.native = (int32_t)ddl__get_u32(&r);
    return f;
}

/* One message each way with a member; messages of ddl's own have negative tags, which no caller can use. */
static ddl_status ddl__form_exchange(ddl_group *parent, int32_t peer, int32_t tag, bool send, ddl__formation *f) {
    uint8_t wire[DDL__FORMATION_BYTES] = {0};
    ddl_transfer t = {send, ddl_tensor_1d(wire, DDL_U8, DDL__FORMATION_BYTES), peer, tag};
    ddl_request *r = NULL;
    ddl_info info;
    if (send) {
        ddl__formation_write(f, wire);
    }
    DDL__TRY(ddl__p2p_make(parent, &t, &r));
    ddl__p2p_start(parent->context, r);
    ddl__wait_requests(parent->context, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, &info));
    if (send) {
        return DDL_OK;
    }
    *f = ddl__formation_read(wire);
    if (info.count != DDL__FORMATION_BYTES || f->verdict > 0) {
        return ddl__error(parent->context, DDL_ERR_CORRUPT, "rank %d sent what is no part of making a group; build all "
                          "ranks with the same ddl.h", peer);
    }
    return DDL_OK;
}

/* The number for a new group that this rank leads: every rank has a range of its own, so that no two leaders give out
 * the same, and uses it up before it begins anew: frames of a group that was freed find none. */
static uint32_t ddl__group_id(ddl_context *c) {
    uint32_t range = UINT32_MAX / ((uint32_t)c->world_size + 1);
    uint32_t id;
    do {
        id = ((uint32_t)c->rank + 1) * range + c->groups->allocated++ % range;
    } while (ddl__group_find(c, id) != NULL);
    return id;
}

static ddl_status ddl__form_error(ddl_group *parent, ddl_status status, const char *name) {
    ddl_context *c = parent->context;
    if (status == DDL_ERR_MISMATCH) {
        return ddl__error(c, status, "making group \"%s\": its ranks gave different lists of members", name);
    }
    if (status == DDL_ERR_NOMEM) {
        return ddl__error(c, status, "making group \"%s\": one of its ranks has no memory for it", name);
    }
    if (c->error.status != status || strstr(c->error.text, "making group") != NULL) {
        return ddl__error(c, status, "making group \"%s\": one of its ranks could not be reached: %s", name,
                          ddl_status_text(status));
    }
    char why[DDL__SENTENCE_BYTES / 2];
    snprintf(why, sizeof why, "%.*s", (int)sizeof why - 1, c->error.text);
    return ddl__error(c, status, "making group \"%s\": %s", name, why);
}

/* What a member says to the leader's number. Answers to an earlier attempt, which failed, are passed over. */
static ddl_status ddl__form_answer(ddl_group *parent, int32_t peer, int32_t tag, ddl__formation *mine) {
    ddl__formation f;
    do {
        DDL__TRY(ddl__form_exchange(parent, peer, tag, false, &f));
    } while (f.id != mine->id);
    mine->native = mine->native != 0 && f.native == 1;
    return f.fingerprint != mine->fingerprint ? DDL_ERR_MISMATCH : (ddl_status)f.verdict;
}

/* The leader: gives the id to all, hears that all have it, and says so. When one cannot (it is dead, or never calls)
 * the others are told, so that they do not wait for the leader. */
static ddl_status ddl__form_lead(ddl_group *parent, const int32_t *ranks, int32_t count, int32_t tag,
                                 ddl__formation *mine, ddl_group *made) {
    ddl_status verdict = made == NULL ? DDL_ERR_NOMEM : DDL_OK;
    for (int32_t round = 0; round < 3; round++) {
        for (int32_t i = 0; i < count; i++) {
            if (ranks[i] == parent->rank || (round == 1 && verdict == DDL_ERR_TIMEOUT)) {
                continue; /* one deadline is enough: the rest is told, not asked */
            }
            ddl__formation f = *mine;
            f.verdict = verdict;
            ddl_status status = round == 1 ? ddl__form_answer(parent, ranks[i], tag, mine)
                                           : ddl__form_exchange(parent, ranks[i], tag, true, &f);
            verdict = verdict < 0 ? verdict : status;
        }
    }
    return verdict;
}

static int32_t ddl__lowest(const int32_t *ranks, int32_t count) {
    int32_t lowest = ranks[0];
    for (int32_t i = 1; i < count; i++) {
        lowest = DDL__MIN(lowest, ranks[i]);
    }
    return lowest;
}

static ddl_group *ddl__form_local(ddl_group *parent, const int32_t *ranks, int32_t count, uint32_t id,
                                  const char *name) {
    ddl_context *c = parent->context;
    int32_t *world = ddl__alloc_array(&c->base, (size_t)count, sizeof *world);
    if (world == NULL) {
        return NULL;
    }
    for (int32_t i = 0; i < count; i++) {
        world[i] = parent->ranks[ranks[i]];
    }
    ddl_group *g = ddl__group_new(c, world, count, id, parent->epoch, name);
    ddl__free(&c->base, world);
    if (g != NULL) {
        g->timeout_ms = parent->timeout_ms;
        g->stall_ms = parent->stall_ms;
        g->tuning = parent->tuning;
        g->user_holds = true;
        c->refs++;
        ddl__native_open(g);
    }
    return g;
}

static void ddl__form_undo(ddl_group *g) {
    if (g != NULL) {
        g->user_holds = false;
        g->context->refs--;
        ddl__group_bury(g);
    }
}

/* Name and list: threads may make groups at once, and which list is whose is told apart. That lists differ shows when
 * the leader's offer of the same name is not taken up: see ddl__rival_offer. */
static int32_t ddl__form_tag(const char *name, uint64_t list) {
    uint64_t n = ddl__mix_bytes(0, name, strlen(name)), mask = (1u << DDL__TAG_LIST_BITS) - 1;
    return DDL__TAG_GROUP + (int32_t)((n & mask) << DDL__TAG_LIST_BITS | (list & mask));
}

/* Forms a group of ranks of parent, all of which are in here now. The lock is held. */
static ddl_status ddl__group_form(ddl_group *parent, const int32_t *ranks, int32_t count, const char *name,
                                  ddl_group **out) {
    ddl_context *c = parent->context;
    uint64_t hash = parent->id;
    for (int32_t i = 0; i < count; i++) {
        hash = ddl__mix(hash, (uint64_t)ranks[i]);
    }
    int32_t tag = ddl__form_tag(name, hash);
    int32_t leader = ddl__lowest(ranks, count);
    ddl__formation f = {.fingerprint = hash};
    ddl_group *made = NULL;
    ddl_status status;
    if (leader == parent->rank) {
        f.id = ddl__group_id(c);
        made = ddl__form_local(parent, ranks, count, f.id, name);
        f.native = made != NULL && made->native.set != NULL;
        status = ddl__form_lead(parent, ranks, count, tag, &f, made);
    } else {
        status = ddl__form_exchange(parent, leader, tag, false, &f);
        const ddl__unexpected *rival = ddl__rival_offer(parent, leader, tag);
        if (status == DDL_ERR_MISMATCH && rival != NULL) { /* the leader is told: it gets an answer */
            tag = rival->tag;
            status = ddl__form_exchange(parent, leader, tag, false, &f);
        }
        if (status == DDL_OK) {
            bool same = f.fingerprint == hash, taken = ddl__group_find(c, f.id) != NULL;
            made = same && !taken && f.verdict == DDL_OK ? ddl__form_local(parent, ranks, count, f.id, name) : NULL;
            f.fingerprint = hash;
            f.native = made != NULL && made->native.set != NULL;
            f.verdict = same && made == NULL ? (taken ? DDL_ERR_CORRUPT : DDL_ERR_NOMEM) : DDL_OK;
            status = ddl__form_exchange(parent, leader, tag, true, &f);
        }
        status = status < 0 ? status : ddl__form_exchange(parent, leader, tag, false, &f);
        status = status < 0 ? status : (ddl_status)f.verdict;
        status = status == DDL_OK && made == NULL ? DDL_ERR_CORRUPT : status; /* the leader contradicts itself */
    }
    if (status < 0) {
        ddl__form_undo(made);
        return ddl__form_error(parent, status, name);
    }
    if (f.native == 0) {
        ddl__native_close(made); /* one of the ranks cannot */
    }
    *out = made;
    return DDL_OK;
}

/* >>public */

static ddl_status ddl__check_members(ddl_group *g, const int32_t *ranks, int32_t count) {
    ddl_context *c = g->context;
    if (ranks == NULL || count < 1 || count > g->size) {
        return ddl__error(c, DDL_ERR_ARG, "ddl_group_create: %d members of a group of %d ranks are not possible", count,
                          g->size);
    }
    bool mine = false;
    for (int32_t i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= g->size) {
            return ddl__error(c, DDL_ERR_ARG,
                              "ddl_group_create: rank %d is not in group \"%s\", whose ranks are 0 to %d", ranks[i],
                              g->name, g->size - 1);
        }
        mine = mine || ranks[i] == g->rank;
        for (int32_t j = 0; j < i; j++) {
            if (ranks[j] == ranks[i]) {
                return ddl__error(c, DDL_ERR_ARG, "ddl_group_create: rank %d is in the list twice", ranks[i]);
            }
        }
    }
    return mine ? DDL_OK
                : ddl__error(c, DDL_ERR_ARG, "ddl_group_create: this rank (%d) is not in the list; only members call",
                             g->rank);
}

DDL_API ddl_status ddl_group_create(ddl_group *parent, const int32_t *ranks, int32_t count, const char *name,
                                    ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(parent, "ddl_group_create", "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(parent, "ddl_group_create"));
    ddl_context *c = parent->context;
    c->doing = "ddl_group_create";
    ddl_status status = ddl__check_members(parent, ranks, count);
    if (status == DDL_OK) {
        char shown[sizeof parent->name]; /* it becomes part of sentences */
        snprintf(shown, sizeof shown, "%s", name != NULL ? name : "");
        ddl__text_clean(shown);
        status = ddl__group_form(parent, ranks, count, shown, out_group);
    }
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

/* An all_gather of two numbers per rank. The lock is held. */
static ddl_status ddl__gather_pairs(ddl_group *g, int32_t first, int32_t second, int32_t *out) {
    uint8_t mine[8], *all = (uint8_t *)out;
    ddl__store_le32(mine, (uint32_t)first);
    ddl__store_le32(mine + 4, (uint32_t)second);
    ddl_tensor in = ddl_tensor_1d(mine, DDL_U8, 8), to = ddl_tensor_1d(all, DDL_U8, 8 * (int64_t)g->size);
    ddl__asked ask = {.kind = DDL_ALL_GATHER, .in = &in, .out = &to};
    ddl_request *r;
    DDL__TRY(ddl__coll_begin(g, &ask, "ddl_group_split", &r));
    ddl__wait_requests(g->context, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    for (int32_t i = 0; i < 2 * g->size; i++) {
        out[i] = (int32_t)ddl__load_le32(all + 4 * (size_t)i);
    }
    return DDL_OK;
}

/* The ranks of a colour by (key, rank), by insertion. */
static int32_t ddl__split_members(const int32_t *pairs, int32_t size, int32_t colour, int32_t *out) {
    int32_t count = 0;
    for (int32_t r = 0; r < size; r++) {
        if (pairs[2 * r] != colour) {
            continue;
        }
        int32_t at = count++;
        while (at > 0 && pairs[2 * out[at - 1] + 1] > pairs[2 * r + 1]) {
            out[at] = out[at - 1];
            at--;
        }
        out[at] = r;
    }
    return count;
}

static ddl_status ddl__split(ddl_group *parent, int32_t colour, int32_t key, ddl_group **out_group) {
    ddl_context *c = parent->context;
    int32_t *pairs = ddl__alloc_array(&c->base, (size_t)parent->size, 3 * sizeof *pairs);
    if (pairs == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_group_split: no memory");
    }
    int32_t *members = pairs + 2 * (size_t)parent->size;
    ddl_status status = ddl__gather_pairs(parent, colour, key, pairs);
    if (status == DDL_OK && colour >= 0) {
        char name[64];
        snprintf(name, sizeof name, "%.40s/%d", parent->name, colour);
        int32_t count = ddl__split_members(pairs, parent->size, colour, members);
        status = ddl__group_form(parent, members, count, name, out_group);
    }
    ddl__free(&c->base, pairs);
    return status;
}

static ddl_status ddl__split_call(ddl_group *parent, int32_t colour, int32_t key, const char *what,
                                  ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(parent, what, "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(parent, what));
    ddl_context *c = parent->context;
    c->doing = what;
    ddl_status status = ddl__split(parent, colour, key, out_group);
    c->doing = NULL;
    ddl__unlock(c);
    return status;
}

DDL_API ddl_status ddl_group_split(ddl_group *parent, int32_t colour, int32_t key, ddl_group **out_group) {
    return ddl__split_call(parent, colour, key, "ddl_group_split", out_group);
}

DDL_API ddl_status ddl_group_duplicate(ddl_group *group, ddl_group **out_group) {
    return ddl__split_call(group, 0, 0, "ddl_group_duplicate", out_group);
}

DDL_API ddl_status ddl_group_translate(const ddl_group *from, const int32_t *ranks, int32_t count, const ddl_group *to,
                                       int32_t *out_ranks) {
    ddl_group *g = (ddl_group *)(uintptr_t)from;
    if (to == NULL || count < 0 || (count > 0 && (ranks == NULL || out_ranks == NULL))) {
        return ddl__refuse_group(g, "ddl_group_translate", to == NULL ? "`to`" : "count is negative, or an array");
    }
    DDL__TRY(ddl__enter_group(g, "ddl_group_translate"));
    ddl_status status = DDL_OK;
    if (to->magic != DDL__GROUP_MAGIC || to->context != g->context) {
        status = ddl__error(g->context, DDL_ERR_ARG, "ddl_group_translate: both groups must be of one context");
    }
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        if (ranks[i] < 0 || ranks[i] >= g->size) {
            status = ddl__error(g->context, DDL_ERR_ARG, "ddl_group_translate: rank %d is not in group \"%s\"",
                                ranks[i], g->name);
        }
    }
    for (int32_t i = 0; i < count && status == DDL_OK; i++) {
        int32_t rank = to->rank_of[g->ranks[ranks[i]]];
        out_ranks[i] = rank >= 0 ? rank : DDL_NO_RANK;
    }
    ddl__unlock(g->context);
    return status;
}

static ddl_status ddl__check_options(ddl_group *g, const ddl_group_options *o) {
    ddl_context *c = g->context;
    const struct {
        const char *name;
        int64_t value, most;
    } numbers[] = {{"timeout_ms", o->timeout_ms, DDL__MS_MAX},
                   {"stall_ms", o->stall_ms, DDL__MS_MAX},
                   {"deterministic", o->deterministic, 1}};
    for (size_t i = 0; i < DDL__COUNT_OF(numbers); i++) {
        if (numbers[i].value != 0 && !ddl__in_range(numbers[i].value, true, numbers[i].most)) {
            return ddl__error(c, DDL_ERR_ARG,
                              "ddl_group_set: %s is %lld; 1 to %lld or -1 is possible, 0 leaves it as it is",
                              numbers[i].name, (long long)numbers[i].value, (long long)numbers[i].most);
        }
    }
    return DDL_OK;
}

DDL_API ddl_status ddl_group_set(ddl_group *group, const ddl_group_options *options) {
    if (options == NULL) {
        return ddl__refuse_group(group, "ddl_group_set", "options");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_group_set"));
    ddl_context *c = group->context;
    ddl__tuning tuning = group->tuning;
    ddl_status status = ddl__check_options(group, options);
    if (status == DDL_OK && options->algorithm != NULL) {
        memset(tuning.forced, 0, sizeof tuning.forced);
        status = ddl__tune_set(c, &tuning, options->algorithm, "ddl_group_set");
    }
    if (status == DDL_OK) {
        tuning.deterministic = options->deterministic != 0 ? options->deterministic > 0 : tuning.deterministic;
        group->settings_version += options->algorithm != NULL || options->deterministic != 0;
        group->tuning = tuning;
        group->timeout_ms = options->timeout_ms != 0 ? options->timeout_ms : group->timeout_ms;
        group->stall_ms = options->stall_ms != 0 ? options->stall_ms : group->stall_ms;
    }
    ddl__unlock(c);
    return status;
}

DDL_API int32_t ddl_rank(const ddl_group *group) { return group != NULL ? group->rank : -1; }

DDL_API int32_t ddl_size(const ddl_group *group) { return group != NULL ? group->size : -1; }

DDL_API const char *ddl_group_name(const ddl_group *group) { return group != NULL ? group->name : ""; }

DDL_API ddl_context *ddl_group_context(const ddl_group *group) { return group != NULL ? group->context : NULL; }

/* >>coll/agree */
/* coll, fifth part: agreement in spite of deaths, and the group of the survivors that stands on it.
 *
 * What it has to give is what MPI's ULFM calls agreement (Herault, Bouteiller, Bosilca et al., "Practical scalable
 * consensus for pseudo-synchronous distributed systems", SC'15): all who return have the same value, although ranks,
 * the coordinator too, die at any moment. This is their problem, not their tree: a star around the lowest living rank.
 *
 *     JOIN     member -> coordinator   my contribution, or the value that I have accepted, and who proposed it
 *     PROPOSE  coordinator -> all      when all who live have joined: the accepted value of the highest round, or, if
 *                                      nobody has accepted one, the contributions put together
 *     ACCEPT   member -> coordinator
 *     DECIDE   coordinator -> all      when all who live have accepted; passed on, once, by everybody who hears it
 *
 * A round is named by its coordinator. A member is in the round of the lowest rank that it does not know to be gone, so
 * its rounds only grow; it accepts proposals of its own round only. Why two ranks never decide differently: if c
 * decided v, all who were alive had accepted v in round c. The coordinator of a later round hears from all who are
 * alive then, each of them in round c or above, so the accepted value of the highest round that it adopts is v again,
 * by induction over rounds. The detector may be slow but must not be wrong: who is declared dead and lives is cut off
 * by everybody, finds the others dead and can at best form a minority. Why it ends: each death that matters moves
 * everybody who lives to a higher round; nobody waits for the dead. DECIDE is passed on so that a coordinator that dies
 * while it tells the result leaves nobody behind who would have to ask ranks that have long been computing again.
 *
 * Agreements of a group are numbered; a rank that gave up at its deadline takes up the same number when it calls again.
 * n messages for each step and n * n for the passing on: this runs once per failure or checkpoint, not per
 * iteration. */

enum { DDL__AGREE_JOIN = 1, DDL__AGREE_PROPOSE = 2, DDL__AGREE_ACCEPT = 3, DDL__AGREE_DECIDE = 4 };
enum { DDL__AGREE_FIXED_BYTES = 18 }; /* of a frame, before the bit per rank */

/* What is agreed on. A number of the sequence that ranks use for different purposes ends in DDL_ERR_MISMATCH. */
typedef enum ddl__purpose {
    DDL__AGREE_FLAG = 1,   /* ddl_agree */
    DDL__AGREE_SHRINK = 2, /* who is left, and the id of their group */
    DDL__AGREE_MADE = 3    /* all have made it, or not */
} ddl__purpose;

#define DDL__AGREE_PAUSE_NS (1 * DDL__NS_PER_S)

typedef struct ddl__value {
    uint8_t purpose;
    int32_t verdict; /* a ddl_status */
    uint32_t flag, id;
    uint8_t *gone; /* one bit per rank of the group: dead, or left */
} ddl__value;

/* What the coordinator knows of one member. */
typedef struct ddl__voter {
    bool joined, accepted;
    uint8_t purpose;
    uint32_t flag;
} ddl__voter;

typedef struct ddl__agreement {
    struct ddl__agreement *next;
    uint32_t sequence;
    int32_t joined;   /* the round that this rank is in, -1: not called yet */
    int32_t accepted; /* the round whose proposal it has accepted, -1: none */
    bool proposed, decided;
    uint64_t joined_ns;
    ddl__value mine, value; /* own contribution; accepted, then decided */
    int32_t best;           /* the highest round of an accepted value that a JOIN brought, -1: none */
    ddl__value heard;       /* that value */
    uint8_t *gone_of;       /* coordinator: whom each rank takes for gone, a bitmap each; NULL until the first JOIN */
    ddl__voter voters[];    /* by group rank; behind them the three bitmaps */
} ddl__agreement;

static size_t ddl__agree_bytes(const ddl_group *g) { return ((size_t)g->size + 7) / 8; }

static bool ddl__bit(const uint8_t *bits, int32_t i) { return (bits[i / 8] >> (i % 8) & 1) != 0; }

static void ddl__bit_set(uint8_t *bits, int32_t i) { bits[i / 8] = (uint8_t)(bits[i / 8] | 1u << (i % 8)); }

static ddl__agreement *ddl__agreement_find(const ddl_group *g, uint32_t sequence) {
    ddl__agreement *a = g->agreements;
    while (a != NULL && a->sequence != sequence) {
        a = a->next;
    }
    return a;
}

static void ddl__agreement_free(ddl__base *base, ddl__agreement *a) {
    ddl__free(base, a->gone_of);
    ddl__free(base, a);
}

/* Finds or makes it. The one before stays, to tell who asks late; older ones go. */
static ddl__agreement *ddl__agreement_get(ddl_group *g, uint32_t sequence) {
    ddl__base *base = &g->context->base;
    ddl__agreement *a = ddl__agreement_find(g, sequence);
    if (a != NULL) {
        return a;
    }
    size_t bits = ddl__agree_bytes(g), fixed = sizeof *a + (size_t)g->size * sizeof a->voters[0];
    a = ddl__alloc(base, fixed + 3 * bits);
    if (a == NULL) {
        return NULL;
    }
    a->sequence = sequence;
    a->joined = a->accepted = a->best = -1;
    a->mine.gone = (uint8_t *)a + fixed;
    a->value.gone = a->mine.gone + bits;
    a->heard.gone = a->value.gone + bits;
    a->next = g->agreements;
    g->agreements = a;
    for (ddl__agreement **at = &a->next; *at != NULL;) {
        ddl__agreement *old = *at;
        if (old->sequence + 1 < g->agree_sequence) {
            *at = old->next;
            ddl__agreement_free(base, old);
        } else {
            at = &old->next;
        }
    }
    return a;
}

static void ddl__agree_group_free(ddl_group *g) {
    while (g->agreements != NULL) {
        ddl__agreement *a = g->agreements;
        g->agreements = a->next;
        ddl__agreement_free(&g->context->base, a);
    }
}

static void ddl__value_copy(const ddl_group *g, ddl__value *to, const ddl__value *from) {
    uint8_t *gone = to->gone;
    memcpy(gone, from->gone, ddl__agree_bytes(g));
    *to = *from;
    to->gone = gone;
}

/* >>frames
 *     kind u8, purpose u8, round u32, verdict u32, flag u32, id u32, a bit per rank; `sequence` is the agreement's */

static void ddl__agree_tell(ddl_group *g, int32_t rank, uint32_t sequence, uint8_t kind, int32_t round,
                            const ddl__value *value) {
    size_t bytes = DDL__AGREE_FIXED_BYTES + ddl__agree_bytes(g);
    uint8_t *payload = ddl__scratch_get(g->context, bytes);
    if (payload == NULL) {
        return; /* as lost: whoever misses it asks again */
    }
    ddl__writer w = ddl__writer_of(payload, bytes);
    ddl__put_u8(&w, kind);
    ddl__put_u8(&w, value->purpose);
    ddl__put_u32(&w, (uint32_t)round);
    ddl__put_u32(&w, (uint32_t)value->verdict);
    ddl__put_u32(&w, value->flag);
    ddl__put_u32(&w, value->id);
    ddl__put_bytes(&w, value->gone, ddl__agree_bytes(g));
    ddl__frame f = {.type = DDL__FRAME_AGREE, .group = g->id, .epoch = g->epoch, .sequence = sequence};
    ddl__tell(g->context, g->ranks[rank], f, payload, w.at);
    ddl__scratch_put(g->context, payload);
}

static void ddl__agree_tell_all(ddl_group *g, const ddl__agreement *a, uint8_t kind, int32_t round) {
    for (int32_t i = 0; i < g->size; i++) {
        if (i != g->rank && !ddl__is_gone(g, i)) {
            ddl__agree_tell(g, i, a->sequence, kind, round, &a->value);
        }
    }
}

static void ddl__agree_decide(ddl_group *g, ddl__agreement *a) {
    a->decided = true;
    ddl__agree_tell_all(g, a, DDL__AGREE_DECIDE, g->rank);
    ddl__changed(g->context);
}

static void ddl__agree_take_join(ddl_group *g, ddl__agreement *a, int32_t from, int32_t round, const ddl__value *v) {
    size_t bits = ddl__agree_bytes(g);
    if (a->gone_of == NULL) {
        a->gone_of = ddl__alloc_array(&g->context->base, (size_t)g->size, bits);
        if (a->gone_of == NULL) {
            return; /* as lost: it asks again */
        }
    }
    a->voters[from] = (ddl__voter){.joined = true, .accepted = a->voters[from].accepted, .purpose = v->purpose,
                                   .flag = v->flag};
    if (a->proposed) { /* it asks again: our proposal, or its answer, was lost to failing memory */
        a->voters[from].accepted = a->voters[from].accepted || round == g->rank;
        if (!a->voters[from].accepted) {
            ddl__agree_tell(g, from, a->sequence, DDL__AGREE_PROPOSE, g->rank, &a->value);
        }
    } else if (round > a->best) {
        a->best = round;
        ddl__value_copy(g, &a->heard, v);
    } else {
        memcpy(a->gone_of + (size_t)from * bits, v->gone, bits);
    }
}

/* One frame, its form checked. A member's agreement is at most one ahead of ours: it needed us for the one before. */
static void ddl__agree_heard(ddl_group *g, int32_t from, uint32_t sequence, uint8_t kind, int32_t round,
                             const ddl__value *v) {
    int32_t ahead = (int32_t)(sequence - g->agree_sequence);
    ddl__agreement *a = ahead >= 1 && ahead <= 2 ? ddl__agreement_get(g, sequence) : ddl__agreement_find(g, sequence);
    if (a == NULL) {
        return; /* too old, or no memory: the sender asks again */
    }
    if (a->decided) {
        if (kind == DDL__AGREE_JOIN) {
            ddl__agree_tell(g, from, sequence, DDL__AGREE_DECIDE, g->rank, &a->value);
        }
        return;
    }
    switch (kind) {
    case DDL__AGREE_JOIN:
        ddl__agree_take_join(g, a, from, round, v);
        break;
    case DDL__AGREE_PROPOSE:
        if (from == a->joined) {
            a->accepted = from;
            ddl__value_copy(g, &a->value, v);
            ddl__agree_tell(g, from, sequence, DDL__AGREE_ACCEPT, from, &a->value);
        }
        break;
    case DDL__AGREE_ACCEPT:
        a->voters[from].accepted = a->proposed && round == g->rank;
        break;
    default:
        ddl__value_copy(g, &a->value, v);
        ddl__agree_decide(g, a);
    }
}

static ddl_status ddl__on_agree(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl_group *g = ddl__frame_group(c, peer, f);
    if (g == NULL) {
        return DDL_OK;
    }
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    uint8_t kind = ddl__get_u8(&r);
    ddl__value v = {.purpose = ddl__get_u8(&r)};
    int32_t round = (int32_t)ddl__get_u32(&r);
    v.verdict = (int32_t)ddl__get_u32(&r);
    v.flag = ddl__get_u32(&r);
    v.id = ddl__get_u32(&r);
    v.gone = (uint8_t *)(uintptr_t)ddl__get_view(&r, ddl__agree_bytes(g)); /* it is only read */
    if (r.bad || v.verdict > 0 || kind < DDL__AGREE_JOIN || kind > DDL__AGREE_DECIDE || round < -1 ||
        round >= g->size) {
        return DDL_ERR_CORRUPT;
    }
    ddl__agree_heard(g, g->rank_of[peer], (uint32_t)f->sequence, kind, round, &v);
    return DDL_OK;
}

/* >>rounds */

/* The value of a first round: the contributions of all who live. Who joined and was cut off since finds everybody else
 * dead: it takes nobody with it. */
static void ddl__agree_put_together(ddl_group *g, ddl__agreement *a) {
    ddl__value *v = &a->value;
    size_t bits = ddl__agree_bytes(g);
    ddl__value_copy(g, v, &a->mine);
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__is_gone(g, i)) {
            ddl__bit_set(v->gone, i);
        } else if (i != g->rank) {
            for (size_t at = 0; at < bits; at++) {
                v->gone[at] |= a->gone_of[(size_t)i * bits + at];
            }
            v->flag &= a->voters[i].flag;
            v->verdict = a->voters[i].purpose != v->purpose ? DDL_ERR_MISMATCH : v->verdict;
        }
    }
    v->id = v->purpose == DDL__AGREE_SHRINK ? ddl__group_id(g->context) : 0;
}

static bool ddl__agree_all(const ddl_group *g, const ddl__agreement *a, bool accepted) {
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__voter *v = &a->voters[i];
        if (i != g->rank && !(accepted ? v->accepted : v->joined) && !ddl__is_gone(g, i)) {
            return false;
        }
    }
    return true;
}

static void ddl__agree_lead(ddl_group *g, ddl__agreement *a) {
    if (!a->proposed && ddl__agree_all(g, a, false)) {
        a->proposed = true;
        if (a->accepted >= 0 && a->accepted >= a->best) {
            /* our own accepted value is the newest */
        } else if (a->best >= 0) {
            ddl__value_copy(g, &a->value, &a->heard);
        } else {
            ddl__agree_put_together(g, a);
        }
        a->accepted = g->rank;
        ddl__agree_tell_all(g, a, DDL__AGREE_PROPOSE, g->rank);
    }
    if (a->proposed && ddl__agree_all(g, a, true)) {
        ddl__agree_decide(g, a);
    }
}

/* Goes to the round of the lowest rank that lives. Joining again after a while mends what failing memory has lost. */
static void ddl__agree_step(ddl_group *g, ddl__agreement *a) {
    int32_t lowest = 0;
    while (ddl__is_gone(g, lowest)) {
        lowest++;
    }
    uint64_t now = ddl__now_ns();
    if (lowest == g->rank) {
        a->joined = lowest;
        ddl__agree_lead(g, a);
    } else if (lowest != a->joined || now - a->joined_ns > DDL__AGREE_PAUSE_NS) {
        a->joined = lowest;
        a->joined_ns = now;
        ddl__agree_tell(g, lowest, a->sequence, DDL__AGREE_JOIN, a->accepted,
                        a->accepted >= 0 ? &a->value : &a->mine);
    }
}

/* >>waiting */

typedef struct ddl__agree_wait {
    ddl_group *group;
    ddl__agreement *agreement;
    uint64_t start_ns, report_ns;
} ddl__agree_wait;

static bool ddl__agree_done(ddl_context *c, void *arg) {
    ddl__agree_wait *w = arg;
    if (!w->agreement->decided && !c->finalized && !c->aborted) {
        ddl__agree_step(w->group, w->agreement);
    }
    return w->agreement->decided || c->finalized || c->aborted;
}

static int32_t ddl__agree_expect(ddl_context *c, void *arg) {
    (void)c;
    const ddl__agree_wait *w = arg;
    return w->agreement->joined >= 0 && w->agreement->joined != w->group->rank
               ? w->group->ranks[w->agreement->joined]
               : -1;
}

/* Who is missing: the coordinator knows; the others know only the coordinator. */
static void ddl__agree_explain(const ddl__agree_wait *w, const char *what, ddl__text *text) {
    const ddl_group *g = w->group;
    const ddl__agreement *a = w->agreement;
    ddl__text_add(text, "%s on group \"%s\" (%d ranks), rank %d waits for", what, g->name, g->size, g->rank);
    if (a->joined != g->rank) {
        ddl__text_add(text, " rank %d, which collects what all say", a->joined);
        return;
    }
    int32_t named = 0;
    for (int32_t i = 0; i < g->size; i++) {
        const ddl__voter *v = &a->voters[i];
        if (i != g->rank && !(a->proposed ? v->accepted : v->joined) && !ddl__is_gone(g, i) && named++ < 8) {
            ddl__text_add(text, " rank %d", i);
        }
    }
}

static void ddl__agree_tick(ddl_context *c, void *arg, uint64_t now) {
    ddl__agree_wait *w = arg;
    int64_t stall_ms = w->group->stall_ms;
    if (stall_ms > 0 && now - w->report_ns > (uint64_t)stall_ms * DDL__NS_PER_MS) {
        w->report_ns = now;
        char line[DDL__SENTENCE_BYTES];
        ddl__text text = {line, sizeof line, 0};
        ddl__agree_explain(w, c->doing, &text);
        ddl__log(&c->base, DDL_LOG_WARN, "stalled for %.1f s: %s", (double)(now - w->start_ns) / 1e9, line);
    }
}

static ddl_status ddl__agree_undecided(const ddl__agree_wait *w) {
    ddl_context *c = w->group->context;
    char line[DDL__SENTENCE_BYTES - 200];
    ddl__text text = {line, sizeof line, 0};
    if (c->aborted) {
        return ddl__error(c, DDL_ERR_ABORTED, "%s", c->abort_text);
    }
    if (c->finalized) {
        return ddl__error(c, DDL_ERR_STATE, "%s: the context was finalized meanwhile", c->doing);
    }
    ddl__agree_explain(w, c->doing, &text);
    return ddl__error(c, DDL_ERR_TIMEOUT,
                      "%s; the deadline of %.1f s passed. Every rank that lives must call; calling again "
                      "takes it up where it was",
                      line, (double)(ddl__now_ns() - w->start_ns) / 1e9);
}

/* Agrees on one number of the sequence. *out is valid until the group's next but one. */
static ddl_status ddl__agree_once(ddl_group *g, ddl__purpose purpose, uint32_t flag, ddl__agreement **out) {
    ddl_context *c = g->context;
    ddl__agreement *a = ddl__agreement_get(g, g->agree_sequence + 1);
    const ddl__agreement *before = ddl__agreement_find(g, g->agree_sequence);
    if (a == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "%s: no memory", c->doing);
    }
    a->mine.purpose = (uint8_t)purpose;
    a->mine.flag = flag;
    a->joined_ns = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__is_gone(g, i) || (before != NULL && ddl__bit(before->value.gone, i))) {
            ddl__bit_set(a->mine.gone, i);
        }
    }
    ddl__agree_wait state = {.group = g, .agreement = a, .start_ns = ddl__now_ns()};
    state.report_ns = state.start_ns;
    ddl__wait w = {.done = ddl__agree_done,
                   .tick = ddl__agree_tick,
                   .expect = ddl__agree_expect,
                   .arg = &state,
                   .deadline = ddl__deadline(state.start_ns, g->timeout_ms)};
    ddl__wait_for(c, &w);
    if (!a->decided) {
        return ddl__agree_undecided(&state);
    }
    ddl__flush_notes(c);
    g->agree_sequence = a->sequence;
    *out = a;
    return DDL_OK;
}

/* Agrees for a purpose. A number that this rank had left at its deadline, and that was decided for another purpose
 * meanwhile, is passed by. */
static ddl_status ddl__agree_on(ddl_group *g, ddl__purpose purpose, uint32_t flag, ddl__agreement **out) {
    ddl_context *c = g->context;
    do {
        DDL__TRY(ddl__agree_once(g, purpose, flag, out));
        if ((*out)->value.verdict < 0) {
            return ddl__error(c, (ddl_status)(*out)->value.verdict,
                              "%s on group \"%s\": one rank called ddl_agree while "
                              "another called ddl_group_shrink",
                              c->doing, g->name);
        }
        if (ddl__bit((*out)->value.gone, g->rank)) {
            return ddl__error(c, DDL_ERR_QUORUM,
                              "%s on group \"%s\": the others agreed that this rank (%d) is dead; it "
                              "cannot take part any more",
                              c->doing, g->name, g->rank);
        }
    } while ((*out)->value.purpose != purpose);
    return DDL_OK;
}

/* >>public */

/* One thread at a time; and the context must not go away under the wait. */
static ddl_status ddl__agree_enter(ddl_group *g, const char *what) {
    ddl_context *c = g->context;
    if (g->agreeing) {
        return ddl__error(c, DDL_ERR_STATE, "%s: another thread is in ddl_agree or ddl_group_shrink on group \"%s\"",
                          what, g->name);
    }
    if (c->aborted) {
        return ddl__error(c, DDL_ERR_ABORTED, "%s", c->abort_text);
    }
    c->doing = what;
    g->agreeing = true;
    g->outstanding++; /* it is not freed while we wait */
    return DDL_OK;
}

static void ddl__agree_leave(ddl_group *g) {
    g->context->doing = NULL;
    g->agreeing = false;
    g->outstanding--;
}

/* DDL_ERR_PEER when ranks are gone that the agreement before did not know of. */
static ddl_status ddl__agree_news(ddl_group *g, const ddl__agreement *a) {
    const ddl__agreement *before = ddl__agreement_find(g, a->sequence - 1);
    char list[128];
    ddl__text text = {list, sizeof list, 0};
    for (int32_t i = 0; i < g->size; i++) {
        if (ddl__bit(a->value.gone, i) && !(before != NULL && ddl__bit(before->value.gone, i))) {
            ddl__text_add(&text, " %d", i);
        }
    }
    if (text.used == 0) {
        return DDL_OK;
    }
    return ddl__error(g->context, DDL_ERR_PEER, "ddl_agree on group \"%s\": all agree that these ranks are gone:%s%s%s",
                      g->name, list, g->cause[0] != 0 ? ". " : "", g->cause);
}

DDL_API ddl_status ddl_agree(ddl_group *group, int32_t *flag) {
    if (flag == NULL) {
        return ddl__refuse_group(group, "ddl_agree", "flag");
    }
    DDL__TRY(ddl__enter_group(group, "ddl_agree"));
    ddl_context *c = group->context;
    ddl__agreement *a;
    ddl_status status = ddl__agree_enter(group, "ddl_agree");
    if (status == DDL_OK) {
        status = ddl__agree_on(group, DDL__AGREE_FLAG, (uint32_t)*flag, &a);
        if (status == DDL_OK) {
            *flag = (int32_t)a->value.flag;
            status = ddl__agree_news(group, a);
        }
        ddl__agree_leave(group);
    }
    ddl__unlock(c);
    return status;
}

/* What a survivor has of the new group; the agreement keeps what all have. */
enum { DDL__MADE_GROUP = 1, DDL__MADE_NATIVE = 2 };

/* The local part of the survivors' group; NULL without memory. */
static ddl_group *ddl__shrink_local(ddl_group *g, const ddl__value *v, int32_t count) {
    ddl_context *c = g->context;
    bool usable = v->id != 0 && ddl__group_find(c, v->id) == NULL;
    int32_t *ranks = usable ? ddl__alloc_array(&c->base, (size_t)count, sizeof *ranks) : NULL;
    if (ranks == NULL) {
        return NULL;
    }
    int32_t at = 0;
    for (int32_t i = 0; i < g->size; i++) {
        if (!ddl__bit(v->gone, i)) {
            ranks[at++] = i;
        }
    }
    char name[64];
    snprintf(name, sizeof name, "%.*s@%u", (int)DDL__MIN(strcspn(g->name, "@"), 48u), g->name, g->epoch + 1);
    ddl_group *made = ddl__form_local(g, ranks, count, v->id, name);
    ddl__free(&c->base, ranks);
    if (made != NULL) {
        made->epoch = g->epoch + 1;
    }
    return made;
}

static int32_t ddl__count_left(const ddl_group *g, const uint8_t *gone) {
    int32_t left = 0;
    for (int32_t i = 0; i < g->size; i++) {
        left += !ddl__bit(gone, i);
    }
    return left;
}

/* Agree on who is left, make their group, agree that all have made it: nobody may use it before. If somebody died
 * meanwhile, once more; all see the same agreements and so take the same turns. */
static ddl_status ddl__shrink(ddl_group *g, ddl_group **out) {
    ddl_context *c = g->context;
    for (;;) {
        ddl__agreement *a;
        DDL__TRY(ddl__agree_on(g, DDL__AGREE_SHRINK, 1, &a));
        int32_t left = ddl__count_left(g, a->value.gone);
        if (2 * left <= g->size) {
            return ddl__error(c, DDL_ERR_QUORUM,
                              "ddl_group_shrink: %d of the %d ranks of group \"%s\" are left, which is not "
                              "more than half: others may go on elsewhere. Start the job again from a checkpoint",
                              left, g->size, g->name);
        }
        ddl_group *made = ddl__shrink_local(g, &a->value, left);
        uint32_t parts = (made != NULL ? DDL__MADE_GROUP : 0u) |
                         (made != NULL && made->native.set != NULL ? DDL__MADE_NATIVE : 0u);
        ddl_status status = ddl__agree_on(g, DDL__AGREE_MADE, parts, &a);
        bool all_have_it = status == DDL_OK && (a->value.flag & DDL__MADE_GROUP) != 0;
        if (made != NULL && status == DDL_OK && (a->value.flag & DDL__MADE_NATIVE) == 0) {
            ddl__native_close(made);
        }
        if (all_have_it && ddl__count_left(g, a->value.gone) == left) {
            *out = made;
            return DDL_OK;
        }
        ddl__form_undo(made);
        DDL__TRY(status);
        if (!all_have_it) {
            return ddl__error(c, DDL_ERR_NOMEM,
                              "ddl_group_shrink: one of the ranks that are left has no memory for the new "
                              "group");
        }
    }
}

DDL_API ddl_status ddl_group_shrink(ddl_group *group, ddl_group **out_group) {
    if (out_group == NULL) {
        return ddl__refuse_group(group, "ddl_group_shrink", "out_group");
    }
    *out_group = NULL;
    DDL__TRY(ddl__enter_group(group, "ddl_group_shrink"));
    ddl_context *c = group->context;
    ddl_status status = ddl__agree_enter(group, "ddl_group_shrink");
    if (status == DDL_OK) {
        status = ddl__shrink(group, out_group);
        ddl__agree_leave(group);
    }
    ddl__unlock(c);
    return status;
}

/* >>coll/measure */
/* coll, fifth part: the first words of a new world. A barrier shows that all can reach each other; a few messages
 * measure what the cost model needs. One pair measures for all, so that every rank chooses the same algorithms. The
 * figures are rounded to powers of the root of two: noise then rarely changes a choice, and with it the order of a sum.
 * With DDL_TUNE_CACHE they are kept in a file, and later runs of the same shape choose exactly alike. */

enum { DDL__PINGS = 24, DDL__STREAMS = 6, DDL__STREAM_BYTES = 256 * 1024, DDL__TAG_MEASURE = INT32_MIN + 0x50000000 };
enum { DDL__FIGURES = 5 }; /* latency and time per byte, near and far; and whether they were kept */

static ddl_status ddl__on_abort(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload);

/* With a progress thread, differing calls and long waits are noticed while the program computes; an operation ends by
 * its deadline only when somebody waits for it. */
static void ddl__thread_tick(ddl_context *c, void *arg, uint64_t now) {
    (void)arg;
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (ddl__is_pending(r) && now - DDL__MIN(r->attended_ns, now) > DDL__ATTEND_NS) {
            ddl__request_attend(c, r, now, false);
        }
    }
}

/* One message of ddl's own, blocking. */
static ddl_status ddl__measure_move(ddl_group *g, int32_t peer, bool send, void *data, int64_t bytes) {
    ddl_transfer t = {send, ddl_tensor_1d(data, DDL_U8, bytes), peer, DDL__TAG_MEASURE};
    ddl_request *r = NULL;
    DDL__TRY(ddl__p2p_make(g, &t, &r));
    ddl__p2p_start(g->context, r);
    ddl__wait_requests(g->context, &r, 1, false);
    return ddl__request_report(&r, NULL);
}

/* Shortest of several round trips of one size, in seconds one way. */
static ddl_status ddl__measure_trip(ddl_group *g, int32_t peer, bool first, void *data, int64_t bytes, int32_t rounds,
                                    double *out_s) {
    uint64_t least = UINT64_MAX;
    for (int32_t i = 0; i < rounds; i++) {
        uint64_t start = ddl__now_ns();
        DDL__TRY(ddl__measure_move(g, peer, first, data, bytes));
        DDL__TRY(ddl__measure_move(g, peer, !first, data, bytes));
        least = DDL__MIN(least, ddl__now_ns() - start);
    }
    *out_s = (double)least / 2e9;
    return DDL_OK;
}

/* Rounds to a power of sqrt(2), by halving and doubling: libm is not linked. */
static double ddl__round_figure(double value) {
    const double root = 1.4142135623730951;
    double figure = DDL__FIGURE_MIN;
    while (figure * 1.189207115 < value && figure < DDL__FIGURE_MAX / 10) {
        figure *= root;
    }
    return figure;
}

/* The pair that measures links inside a host (near) or between hosts: the lowest ranks of that kind. */
static bool ddl__measure_pair(const ddl_context *c, bool near_link, int32_t *out_a, int32_t *out_b) {
    for (int32_t a = 0; a < c->world_size; a++) {
        for (int32_t b = a + 1; b < c->world_size; b++) {
            if ((c->links[a].host == c->links[b].host) == near_link) {
                *out_a = a;
                *out_b = b;
                return true;
            }
        }
    }
    return false;
}

/* Figures travel as the bits of doubles. */
static void ddl__figures_write(const double *figures, int32_t count, uint8_t *out) {
    for (int32_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &figures[i], sizeof bits);
        ddl__store_le64(out + 8 * i, bits);
    }
}

static void ddl__figures_read(const uint8_t *in, int32_t count, double *out_figures) {
    for (int32_t i = 0; i < count; i++) {
        uint64_t bits = ddl__load_le64(in + 8 * i);
        memcpy(&out_figures[i], &bits, sizeof bits);
    }
}

static ddl_status ddl__figures_broadcast(ddl_context *c, double *figures, int32_t count, int32_t root) {
    uint8_t wire[8 * DDL__FIGURES] = {0};
    ddl_tensor t = ddl_tensor_1d(wire, DDL_U8, 8 * (int64_t)count);
    ddl__asked ask = {.kind = DDL_BROADCAST, .in = &t, .root = root};
    ddl_request *r;
    ddl__figures_write(figures, count, wire);
    DDL__TRY(ddl__coll_begin(c->world, &ask, "ddl_init", &r));
    ddl__wait_requests(c, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    ddl__figures_read(wire, count, figures);
    return DDL_OK;
}

/* Latency and bandwidth of one kind of link; figures[0] seconds, figures[1] seconds per byte. */
static ddl_status ddl__measure_links(ddl_context *c, bool near_link, double figures[2]) {
    int32_t a, b;
    if (!ddl__measure_pair(c, near_link, &a, &b)) {
        return DDL_OK;
    }
    if (c->rank == a || c->rank == b) {
        char *data = ddl__scratch_get(c, DDL__STREAM_BYTES);
        if (data == NULL) {
            return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory to measure the links");
        }
        memset(data, 0, DDL__STREAM_BYTES);
        int32_t peer = c->rank == a ? b : a;
        double small = 0, large = 0;
        ddl_status status = ddl__measure_trip(c->world, peer, c->rank == a, data, 8, DDL__PINGS, &small);
        if (status == DDL_OK) {
            status = ddl__measure_trip(c->world, peer, c->rank == a, data, DDL__STREAM_BYTES, DDL__STREAMS, &large);
        }
        ddl__scratch_put(c, data);
        DDL__TRY(status);
        figures[0] = ddl__round_figure(small);
        figures[1] = ddl__round_figure(large > small ? (large - small) / DDL__STREAM_BYTES : 1e-11);
    }
    return ddl__figures_broadcast(c, figures, 2, a);
}

/* >>cache */

/* What the figures depend on: the shape of the world and how its ranks reach each other. */
static uint64_t ddl__model_key(const ddl_context *c) {
    uint64_t key = ddl__mix((uint64_t)ddl_version(), (uint64_t)c->world_size);
    for (int32_t i = 0; i < c->world_size; i++) {
        const ddl__endpoint *e = c->links[i].endpoint;
        const char *name = e != NULL ? e->plugin->name : "";
        key = ddl__mix(key, (uint64_t)c->links[i].host);
        key = i == c->rank ? key : ddl__mix_bytes(key, name, strlen(name));
    }
    return ddl__mix(key, (uint64_t)c->tuning.model.oversubscription);
}

static bool ddl__model_load(const ddl_context *c, const char *path, double figures[4]) {
    FILE *file = fopen(path, "re");
    char line[160];
    bool found = false;
    uint64_t key, mine = ddl__model_key(c);
    double f[4];
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = ddl__model_parse(line, &key, f) && key == mine;
    }
    if (found) {
        memcpy(figures, f, sizeof f);
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

/* One appended line: writers of other jobs cannot tear it. */
static void ddl__model_save(const ddl_context *c, const char *path, const double figures[4]) {
    char line[160];
    size_t bytes = ddl__model_write(line, sizeof line, ddl__model_key(c), figures);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, bytes) != (ssize_t)bytes) {
        ddl__log(&c->base, DDL_LOG_WARN, "DDL_TUNE_CACHE: cannot write to %s: %s; the measured figures are not kept",
                 path, strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
}

/* >>greeting */

static ddl_status ddl__measure(ddl_context *c) {
    ddl__cost_model *m = &c->tuning.model;
    double figures[DDL__FIGURES] = {m->latency_s[0], m->s_per_byte[0], m->latency_s[1], m->s_per_byte[1], 0};
    const char *path = c->settings.tune_cache;
    if (path != NULL && c->rank == 0) {
        figures[4] = ddl__model_load(c, path, figures) ? 1 : 0;
    }
    if (path != NULL) {
        DDL__TRY(ddl__figures_broadcast(c, figures, DDL__FIGURES, 0));
    }
    if (figures[4] == 0) {
        DDL__TRY(ddl__measure_links(c, true, figures));
        DDL__TRY(ddl__measure_links(c, false, figures + 2));
        if (path != NULL && c->rank == 0) {
            ddl__model_save(c, path, figures);
        }
    }
    m->latency_s[0] = figures[0];
    m->s_per_byte[0] = figures[1];
    m->latency_s[1] = figures[2];
    m->s_per_byte[1] = figures[3];
    /* About half of the way of a small message is the sender's own work. */
    m->message_s = figures[0] / 2;
    c->world->tuning.model = *m;
    c->world->settings_version++;
    return DDL_OK;
}

/* The line at the start: who is there, how they reach each other, and why. */
static void ddl__announce(ddl_context *c) {
    char line[512];
    ddl__text text = {line, sizeof line, 0};
    ddl__text_add(&text, "%d ranks on %d host%s", c->world_size, c->host_count, c->host_count == 1 ? "" : "s");
    for (int32_t e = 0; e < c->endpoint_count; e++) {
        int32_t near_count = 0, far_count = 0;
        for (int32_t i = 0; i < c->world_size; i++) {
            near_count += c->links[i].endpoint == &c->endpoints[e] && c->links[i].same_host;
            far_count += c->links[i].endpoint == &c->endpoints[e] && !c->links[i].same_host;
        }
        if (near_count + far_count > 0) {
            ddl__text_add(&text, "; %s to %d rank%s here and %d elsewhere (%s)", c->endpoints[e].plugin->name,
                          near_count, near_count == 1 ? "" : "s", far_count,
                          c->settings.transports != NULL ? "first of DDL_TRANSPORTS that reaches them"
                                                         : "fastest that reaches them");
        }
    }
    const ddl__cost_model *m = &c->tuning.model;
    ddl__text_add(&text, "; measured %.1f us, %.2f GB/s", m->latency_s[c->host_count > 1] * 1e6,
                  1e-9 / m->s_per_byte[c->host_count > 1]);
    if (m->oversubscription > 1) {
        ddl__text_add(&text, "; %d ranks per core", m->oversubscription);
    }
    ddl__text_add(&text, "; %s", c->settings.secret != NULL ? "authenticated by the job secret"
                                                            : "no job secret: same host and user only");
    ddl__log(&c->base, c->rank == 0 ? DDL_LOG_INFO : DDL_LOG_DEBUG, "%s", line);
}

/* Whether a transport runs the world's collectives by itself: all ranks, or none. */
static ddl_status ddl__native_agree(ddl_group *world) {
    int32_t all = ddl__native_open(world);
    ddl_tensor flag = ddl_tensor_1d(&all, DDL_I32, 1);
    ddl__asked ask = {.kind = DDL_ALL_REDUCE, .in = &flag, .out = &flag, .op = DDL_MIN};
    ddl_request *r;
    ddl__native set = world->native;
    world->native.set = NULL; /* not to be used before all are known to have it */
    ddl_status status = ddl__coll_begin(world, &ask, "ddl_init", &r);
    if (status == DDL_OK) {
        ddl__wait_requests(world->context, &r, 1, false);
        status = ddl__request_report(&r, NULL);
    }
    world->native = set;
    world->settings_version++;
    if (status < 0 || all == 0) {
        ddl__native_close(world);
    }
    return status;
}

static ddl_status ddl__greet(ddl_context *c) {
    if (c->world_size == 1) {
        return DDL_OK;
    }
    ddl__asked ask = {.kind = DDL_BARRIER};
    ddl_request *r;
    int64_t timeout_ms = c->world->timeout_ms;
    c->world->timeout_ms = c->settings.init_timeout_ms;
    /* By dissemination whatever is faster: its links keep the world connected, and news of a death reaches all. */
    c->world->tuning.forced[DDL_BARRIER] = ddl__algo_find(DDL_BARRIER, "dissemination");
    DDL__TRY(ddl__coll_begin(c->world, &ask, "ddl_init", &r));
    ddl__wait_requests(c, &r, 1, false);
    DDL__TRY(ddl__request_report(&r, NULL));
    DDL__TRY(ddl__measure(c));
    DDL__TRY(ddl__native_agree(c->world));
    c->world->timeout_ms = timeout_ms;
    c->world->tuning.forced[DDL_BARRIER] = c->tuning.forced[DDL_BARRIER];
    if (c->settings.progress_thread) {
        int error = pthread_create(&c->thread, NULL, ddl__thread_main, c);
        if (error != 0) {
            return ddl__error(c, DDL_ERR_SYSTEM, "ddl_init: the progress thread cannot be started: %s",
                              strerror(error));
        }
        c->has_thread = true;
    }
    ddl__announce(c);
    return DDL_OK;
}

/* >>coll/transports */
/* coll: the transports of a job, opened before it is joined: those that were asked for, else all that there are. A
 * plugin's transport is tried out first. */

enum { DDL__BLOB_TRANSPORTS = 4, DDL__ADDRESS_BYTES = 128 }; /* that a rank tells the others about */

static const ddl_plugin *ddl__transport_plugin(const ddl_context *c, const char *name, size_t length) {
    if (strlen("tcp") == length && memcmp(name, "tcp", length) == 0) {
        return &ddl__tcp_plugin;
    }
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        if (strlen(p->name) == length && memcmp(p->name, name, length) == 0 && p->plugin->transport != NULL) {
            return p->plugin;
        }
    }
    return NULL;
}

/* The self-test of a plugin's transport. *out_usable: false when it failed and nobody had asked for it. */
static ddl_status ddl__endpoint_try(ddl_context *c, const ddl_plugin *plugin, bool wanted,
                                    const ddl_transport_params *params, bool *out_usable) {
    char reason[DDL__PLUGIN_REASON_BYTES] = "its self-test failed: ";
    size_t head = strlen(reason);
    ddl__text why = {reason + head, sizeof reason - head, 0};
    if (plugin == &ddl__tcp_plugin || ddl__selftest(c, plugin->transport, params, &why)) {
        return DDL_OK;
    }
    bool needed = ddl__loader_reject(&c->loader, plugin, reason);
    if (wanted || needed) {
        return ddl__error(c, DDL_ERR_PLUGIN,
                          "ddl_init: plugin %s, which %s asks for, cannot be used: %s. Repair it or take it off the "
                          "list (DDL_SELF_TEST=0 uses it all the same)",
                          plugin->name, wanted ? "DDL_TRANSPORTS" : "DDL_PLUGINS", reason);
    }
    *out_usable = false;
    return DDL_OK;
}

/* detail: what follows the transport's name in DDL_TRANSPORTS, or NULL. */
static ddl_status ddl__endpoint_open(ddl_context *c, const ddl_plugin *plugin, bool wanted, const char *detail) {
    if (c->endpoint_count == DDL__BLOB_TRANSPORTS) {
        return DDL_OK;
    }
    ddl__endpoint *e = &c->endpoints[c->endpoint_count];
    ddl_transport_params params = {.size = sizeof params,
                                   .rank = c->rank,
                                   .world_size = c->world_size,
                                   .local_ranks = c->settings.launch.local_world,
                                   .cores = c->cores,
                                   .host_id = c->settings.host_id,
                                   .interface_name = c->settings.interface_name,
                                   .advertise = c->settings.advertise,
                                   .port_range = c->settings.port_range,
                                   .master_host = c->settings.place.host,
                                   .authenticated = c->settings.secret != NULL,
                                   .asked = wanted,
                                   .detail = detail};
    size_t bytes = DDL__ADDRESS_BYTES;
    bool usable = true;
    DDL__TRY(ddl__endpoint_try(c, plugin, wanted, &params, &usable));
    if (!usable) {
        return DDL_OK;
    }
    e->plugin = plugin;
    e->table = plugin->transport;
    e->host = ddl__host_table(c);
    c->error.text[0] = 0;
    c->opening = wanted;
    ddl_status status = e->table->open(&e->host, &params, &e->self);
    if (status == DDL_OK) {
        status = e->table->address(e->self, e->address, &bytes);
        if (status < 0) {
            e->table->close(e->self);
        }
    }
    if (status == DDL_OK) {
        ddl__opening_warned(c);
    }
    c->opening = false;
    if (status < 0 && !wanted) {
        ddl__log(&c->base, DDL_LOG_DEBUG, "transport %s cannot be used: %s", plugin->name, ddl_status_text(status));
        return DDL_OK;
    }
    if (status < 0) {
        char why[400];
        snprintf(why, sizeof why, "%.399s", c->error.text[0] != 0 ? c->error.text : ddl_status_text(status));
        return ddl__error(c, status == DDL_ERR_NOMEM || status == DDL_ERR_CONFIG ? status : DDL_ERR_SYSTEM,
                          "ddl_init: transport %s cannot be opened: %s", plugin->name, why);
    }
    e->address_bytes = (uint32_t)bytes;
    c->endpoint_count++;
    return DDL_OK;
}

/* Beside transports that do not notice the end of a host, TCP watches. Without a secret there is one host. */
static ddl_status ddl__watch_open(ddl_context *c) {
    bool blind = false, there = false;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        blind = blind || (c->endpoints[i].table->flags & DDL_TRANSPORT_BLIND) != 0;
        there = there || c->endpoints[i].plugin == &ddl__tcp_plugin;
    }
    int32_t before = c->endpoint_count;
    if (!blind || there || c->settings.secret == NULL) {
        return DDL_OK;
    }
    DDL__TRY(ddl__endpoint_open(c, &ddl__tcp_plugin, false, NULL));
    c->endpoints[before].only_watches = c->endpoint_count > before;
    return DDL_OK;
}

/* Opens the transports that were asked for, in that order; else all that there are. */
static ddl_status ddl__endpoints_open(ddl_context *c) {
    const char *list = c->settings.transports;
    if (list == NULL) {
        for (const ddl__plugin_record *p = c->loader.loaded, *next; p != NULL; p = next) {
            const ddl_transport *t = p->plugin->transport;
            next = p->next; /* one that fails its self-test leaves the list */
            if (t != NULL && (t->flags & DDL_TRANSPORT_ON_REQUEST) == 0) {
                DDL__TRY(ddl__endpoint_open(c, p->plugin, false, NULL));
            }
        }
        return ddl__endpoint_open(c, &ddl__tcp_plugin, true, NULL);
    }
    for (const char *at = list; *at != 0;) {
        size_t length = strcspn(at, ","), name = DDL__MIN(strcspn(at, ":"), length);
        char detail[64];
        snprintf(detail, sizeof detail, "%.*s", (int)DDL__MIN(length - name, sizeof detail), at + name);
        const ddl_plugin *plugin = ddl__transport_plugin(c, at, name);
        if (plugin == NULL) {
            return ddl__error(
                c, DDL_ERR_PLUGIN,
                "ddl_init: transport \"%.*s\" of DDL_TRANSPORTS is not loaded; built in is "
                "tcp, others are plugins (DDL_PLUGINS, DDL_PLUGIN_PATH; DDL_LOG=debug tells where they were "
                "looked for)",
                (int)DDL__MIN(name, 40u), at);
        }
        DDL__TRY(ddl__endpoint_open(c, plugin, true, detail[0] != 0 && detail[1] != 0 ? detail + 1 : NULL));
        at += length + (at[length] == ',');
    }
    return ddl__watch_open(c);
}

/* >>coll/join */
/* coll, last part: joining a job and leaving it. Settings, plugins, one exchange of what each rank is, links, the
 * world. */

enum { DDL__BLOB_MAGIC = 0x316a6c64, DDL__NAME_BYTES = 16, DDL__CORES_MAX = 1 << 20 };

/* What a rank tells the others about itself. */
typedef struct ddl__blob {
    uint32_t magic;
    int32_t version, pid, cores, board_fd;
    int32_t passes_process; /* 1: to ranks of other spaces */
    uint64_t pid_start, pid_space;
    char host_id[64], host_name[32];
    uint8_t pass_name[DDL__PASS_NAME_BYTES];
    struct {
        char name[DDL__NAME_BYTES];
        uint32_t bytes;
        uint8_t address[DDL__ADDRESS_BYTES];
    } transports[DDL__BLOB_TRANSPORTS];
} ddl__blob;

/* On the wire: the members in their order, little-endian, without gaps. All of one size, because a rendezvous is one
 * all-gather. */
enum {
    DDL__BLOB_AT_HOST = 6 * 4 + 2 * 8, /* host_id */
    DDL__BLOB_AT_TRANSPORTS = DDL__BLOB_AT_HOST + 64 + 32 + DDL__PASS_NAME_BYTES,
    DDL__BLOB_TRANSPORT_BYTES = DDL__NAME_BYTES + 4 + DDL__ADDRESS_BYTES,
    DDL__BLOB_BYTES = DDL__BLOB_AT_TRANSPORTS + DDL__BLOB_TRANSPORTS * DDL__BLOB_TRANSPORT_BYTES
};

static void ddl__blob_write(const ddl__blob *b, uint8_t out[DDL__BLOB_BYTES]) {
    ddl__writer w = ddl__writer_of(out, DDL__BLOB_BYTES);
    ddl__put_u32(&w, b->magic);
    ddl__put_u32(&w, (uint32_t)b->version);
    ddl__put_u32(&w, (uint32_t)b->pid);
    ddl__put_u32(&w, (uint32_t)b->cores);
    ddl__put_u32(&w, (uint32_t)b->board_fd);
    ddl__put_u32(&w, (uint32_t)b->passes_process);
    ddl__put_u64(&w, b->pid_start);
    ddl__put_u64(&w, b->pid_space);
    ddl__put_bytes(&w, b->host_id, sizeof b->host_id);
    ddl__put_bytes(&w, b->host_name, sizeof b->host_name);
    ddl__put_bytes(&w, b->pass_name, sizeof b->pass_name);
    for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS; i++) {
        ddl__put_bytes(&w, b->transports[i].name, DDL__NAME_BYTES);
        ddl__put_u32(&w, b->transports[i].bytes);
        ddl__put_bytes(&w, b->transports[i].address, DDL__ADDRESS_BYTES);
    }
}

static void ddl__blob_read(const uint8_t in[DDL__BLOB_BYTES], ddl__blob *b) {
    ddl__reader r = ddl__reader_of(in, DDL__BLOB_BYTES);
    b->magic = ddl__get_u32(&r);
    b->version = (int32_t)ddl__get_u32(&r);
    b->pid = (int32_t)ddl__get_u32(&r);
    b->cores = (int32_t)ddl__get_u32(&r);
    b->board_fd = (int32_t)ddl__get_u32(&r);
    b->passes_process = (int32_t)ddl__get_u32(&r);
    b->pid_start = ddl__get_u64(&r);
    b->pid_space = ddl__get_u64(&r);
    ddl__get_bytes(&r, b->host_id, sizeof b->host_id);
    ddl__get_bytes(&r, b->host_name, sizeof b->host_name);
    ddl__get_bytes(&r, b->pass_name, sizeof b->pass_name);
    for (int32_t i = 0; i < DDL__BLOB_TRANSPORTS; i++) {
        ddl__get_bytes(&r, b->transports[i].name, DDL__NAME_BYTES);
        b->transports[i].bytes = ddl__get_u32(&r);
        ddl__get_bytes(&r, b->transports[i].address, DDL__ADDRESS_BYTES);
    }
}

static void ddl__blob_fill(const ddl_context *c, ddl__blob *b) {
    memset(b, 0, sizeof *b);
    b->magic = DDL__BLOB_MAGIC;
    b->version = ddl_version();
    b->pid = (int32_t)getpid();
    b->cores = DDL__MIN(c->cores, DDL__CORES_MAX);
    b->board_fd = c->board_fd;
    b->passes_process = ddl__can_pass_process();
    b->pid_start = ddl__process_start(b->pid);
    b->pid_space = ddl__process_space();
    memcpy(b->pass_name, c->pass_name, sizeof b->pass_name);
    snprintf(b->host_id, sizeof b->host_id, "%.63s", c->settings.host_id);
    if (gethostname(b->host_name, sizeof b->host_name - 1) != 0 || b->host_name[0] == 0) {
        snprintf(b->host_name, sizeof b->host_name, "?");
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        snprintf(b->transports[i].name, DDL__NAME_BYTES, "%.15s", c->endpoints[i].plugin->name);
        b->transports[i].bytes = c->endpoints[i].address_bytes;
        memcpy(b->transports[i].address, c->endpoints[i].address, c->endpoints[i].address_bytes);
    }
}

/* >>links */

static ddl_status ddl__blob_check(ddl_context *c, const ddl__blob *b, int32_t rank) {
    if (b->magic != DDL__BLOB_MAGIC || memchr(b->host_id, 0, sizeof b->host_id) == NULL ||
        memchr(b->host_name, 0, sizeof b->host_name) == NULL || b->cores < 1 || b->cores > DDL__CORES_MAX) {
        return ddl__error(c, DDL_ERR_CORRUPT,
                          "ddl_init: what rank %d told about itself is damaged, or it is not ddl %d.%d", rank,
                          DDL_VERSION_MAJOR, DDL_VERSION_MINOR);
    }
    if (b->version / 10000 != ddl_version() / 10000) {
        return ddl__error(c, DDL_ERR_VERSION,
                          "ddl_init: rank %d uses ddl %d.%d, this rank %d.%d; build all with one version", rank,
                          b->version / 10000, b->version / 100 % 100, DDL_VERSION_MAJOR, DDL_VERSION_MINOR);
    }
    return DDL_OK;
}

/* What a transport offers towards a rank. */
typedef struct ddl__reach {
    bool reaches;
    bool gave_up; /* it did, until memory or the like was to be shared */
    uint64_t latency_ns, bytes_per_s; /* its own guess */
} ddl__reach;

/* Tells each transport that both ranks have about the rank. offers: of this rank, by endpoint. */
static void ddl__link_offers(ddl_context *c, int32_t rank, const ddl__blob *b, ddl__reach *offers) {
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        offers[i] = (ddl__reach){.latency_ns = 1, .bytes_per_s = 1};
        bool watched = c->links[rank].same_space || c->links[rank].passes_process;
        if ((e->table->flags & DDL_TRANSPORT_LOCAL) != 0 && !watched) {
            continue; /* its end would go unnoticed: memory has none */
        }
        for (int32_t k = 0; k < DDL__BLOB_TRANSPORTS && !offers[i].reaches; k++) {
            offers[i].reaches =
                b->transports[k].bytes > 0 && b->transports[k].bytes <= DDL__ADDRESS_BYTES &&
                strncmp(b->transports[k].name, e->plugin->name, DDL__NAME_BYTES - 1) == 0 &&
                e->table->add_peer(e->self, rank, b->transports[k].address, b->transports[k].bytes, b->host_id,
                                   &offers[i].latency_ns, &offers[i].bytes_per_s) == DDL_OK;
        }
    }
}

/* Asks transports that set something up together with their peers. Returns how many answers are still open. */
static int32_t ddl__links_settling(ddl_context *c, ddl__reach *offers, int32_t *out_rank) {
    int32_t open = 0;
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        for (int32_t i = 0; i < c->endpoint_count; i++) {
            const ddl__endpoint *e = &c->endpoints[i];
            ddl__reach *o = &offers[rank * DDL__ENDPOINTS_MAX + i];
            ddl_status status = o->reaches && DDL_HAS(e->table, ready) ? e->table->ready(e->self, rank) : DDL_OK;
            o->gave_up = o->gave_up || (o->reaches && status < 0);
            o->reaches = o->reaches && status >= 0;
            open += status == DDL_IN_PROGRESS;
            *out_rank = status == DDL_IN_PROGRESS ? rank : *out_rank;
        }
    }
    return open;
}

/* A rank of this host whose process has ended, -1: none. */
static int32_t ddl__links_gone(const ddl_context *c) {
    for (int32_t rank = 0; rank < c->world_size; rank++) {
        const ddl__link *l = &c->links[rank];
        if (rank != c->rank && ddl__has_process(c, l) && ddl__process_gone(l)) {
            return rank;
        }
    }
    return -1;
}

/* Waits until shared memory and the like stand, or have been given up by both sides, and until those whom this rank has
 * told so have heard it: it may end now. When another has ended, its last words, and what others make of them, get time
 * to come: they tell more. *board: see ddl__spaces_settling. */
static ddl_status ddl__links_settle(ddl_context *c, ddl__reach *offers, int32_t board_rank, int *board) {
    uint64_t deadline = ddl__now_ns() + (uint64_t)DDL__MAX(c->settings.init_timeout_ms, 0) * DDL__NS_PER_MS;
    uint64_t gone_ns = 0;
    int32_t rank = 0, gone = -1;
    for (uint32_t round = 1;; round++) {
        int32_t open = ddl__spaces_settling(c, board_rank, board, &rank);
        open += ddl__links_settling(c, offers, &rank);
        if (open == 0 && !ddl__pass_is_sending(c)) {
            return DDL_OK;
        }
        struct pollfd wake = {.fd = c->epoll_fd, .events = POLLIN};
        ddl__pass_progress(c);
        poll(&wake, gone < 0 ? 1u : 0u, 2);
        uint64_t now = ddl__now_ns();
        if (gone < 0 && round % 32 == 0 && (gone = ddl__links_gone(c)) >= 0) {
            gone_ns = now;
        }
        bool lost = gone >= 0 && now - gone_ns > 250 * DDL__NS_PER_MS;
        rank = lost ? gone : rank;
        if (lost || (c->settings.init_timeout_ms >= 0 && now > deadline)) {
            const ddl__link *l = &c->links[rank];
            return ddl__error(c, lost ? DDL_ERR_PEER : DDL_ERR_TIMEOUT,
                              "ddl_init: rank %d (pid %d on host %s) %s before memory was shared with it", rank,
                              l->pid, l->host_name, lost ? "ended" : "did not answer within the deadline");
        }
    }
}

/* Takes the transport with the least time for 64 KiB of those that both ranks have; with DDL_TRANSPORTS the first. */
static ddl_status ddl__link_choose(ddl_context *c, int32_t rank, const ddl__reach *offers) {
    ddl__link *l = &c->links[rank];
    double best = 0;
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        double cost =
            (double)offers[i].latency_ns * 1e-9 + 65536.0 / (double)DDL__MAX(offers[i].bytes_per_s, (uint64_t)1);
        bool better = l->endpoint == NULL || (c->settings.transports == NULL && cost < best);
        if (offers[i].reaches && !c->endpoints[i].only_watches && better) {
            best = cost;
            l->endpoint = &c->endpoints[i];
            l->latency_ns = offers[i].latency_ns;
            l->bytes_per_s = offers[i].bytes_per_s;
        }
    }
    for (int32_t i = 0; l->endpoint == NULL && i < c->endpoint_count; i++) {
        if (offers[i].gave_up) {
            return ddl__error(c, DDL_ERR_SYSTEM,
                              "ddl_init: %s, which DDL_TRANSPORTS asks for, could not be set up between rank %d and "
                              "rank %d on host %s; a warning of a rank of that host tells why (add tcp to "
                              "DDL_TRANSPORTS to go on without)",
                              c->endpoints[i].plugin->name, c->rank, rank, l->host_name);
        }
    }
    for (int32_t i = 0; i < c->endpoint_count && l->endpoint != NULL && !l->same_host; i++) {
        bool blind = (l->endpoint->table->flags & DDL_TRANSPORT_BLIND) != 0;
        if (blind && offers[i].reaches && c->endpoints[i].plugin == &ddl__tcp_plugin) {
            l->watch = &c->endpoints[i];
        }
    }
    if (l->endpoint == NULL) {
        return ddl__error(c, DDL_ERR_CONFIG,
                          "ddl_init: no transport reaches rank %d on host %s from rank %d on host "
                          "%s: each offers only addresses that the other cannot use (DDL_INTERFACE, DDL_ADVERTISE, "
                          "DDL_TRANSPORTS and, without a job secret, unix sockets of one host decide)",
                          rank, l->host_name, c->rank, c->links[c->rank].host_name);
    }
    return DDL_OK;
}

/* Who and where a rank is. Hosts are numbered by first appearance: ranks below have their numbers already. */
static void ddl__link_name(ddl_context *c, int32_t rank, const ddl__blob *table) {
    ddl__link *l = &c->links[rank];
    const ddl__blob *b = &table[rank];
    snprintf(l->host_id, sizeof l->host_id, "%s", b->host_id);
    ddl__text_clean(l->host_id); /* it is part of sentences */
    snprintf(l->host_name, sizeof l->host_name, "%s", b->host_name);
    ddl__text_clean(l->host_name);
    memcpy(l->pass_name, b->pass_name, sizeof l->pass_name);
    l->pid = b->pid;
    l->pid_start = b->pid_start;
    l->same_host = strcmp(b->host_id, table[c->rank].host_id) == 0;
    l->same_space = l->same_host && b->pid_space == table[c->rank].pid_space;
    l->passes_process = l->same_host && !l->same_space && b->passes_process == 1 &&
                        table[c->rank].passes_process == 1 && ddl__can_pass(c, rank);
    l->host = 0;
    for (int32_t i = 0; i < rank; i++) {
        if (strcmp(c->links[i].host_id, l->host_id) == 0) {
            l->host = c->links[i].host;
            break;
        }
        l->host = DDL__MAX(l->host, c->links[i].host + 1);
    }
    c->host_count = DDL__MAX(c->host_count, l->host + 1);
    c->local_ranks += l->same_host;
}

/* Reads the whole table before anything is done with it: this rank's own line, too, came back from another. */
static ddl_status ddl__links_read(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    for (int32_t i = 0; i < c->world_size; i++) {
        DDL__TRY(ddl__blob_check(c, &table[i], i));
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_name(c, i, table);
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        if (i != c->rank) {
            ddl__link_offers(c, i, &table[i], offers + i * DDL__ENDPOINTS_MAX);
        }
    }
    return DDL_OK;
}

/* The end of a process on this host is noticed at once. */
static void ddl__link_watch(ddl_context *c, int32_t rank) {
    ddl__link *l = &c->links[rank];
    int fd = rank != c->rank && ddl__has_process(c, l) ? ddl__process_open(l->pid, l->pid_start) : -1;
    if (fd >= 0) {
        ddl__link_watch_fd(c, rank, fd);
    }
}

/* Ranks per core on the fullest host, the same on all ranks: the table is. */
static int32_t ddl__crowding(const ddl_context *c, const ddl__blob *table) {
    int32_t worst = 1;
    for (int32_t h = 0; h < c->host_count; h++) {
        int32_t ranks = 0, cores = 1;
        for (int32_t i = 0; i < c->world_size; i++) {
            if (c->links[i].host == h) {
                ranks++;
                cores = DDL__MAX(cores, table[i].cores);
            }
        }
        worst = DDL__MAX(worst, (ranks + cores - 1) / cores);
    }
    return worst;
}

/* From the table of what all ranks told: links, and what is shared inside the host. */
static ddl_status ddl__links_make(ddl_context *c, const ddl__blob *table, ddl__reach *offers) {
    DDL__TRY(ddl__links_read(c, table, offers));
    for (int32_t i = 0; i < c->world_size; i++) {
        ddl__link_watch(c, i);
    }
    int32_t first = 0;
    while (!c->links[first].same_host) {
        first++;
    }
    int board = c->links[first].same_space ? ddl__board_reach(table[first].pid, table[first].board_fd) : -1;
    ddl_status status = ddl__links_settle(c, offers, first, &board);
    ddl__board_open(c, board);
    ddl__places_open(c);
    for (int32_t i = 0; i < c->world_size && status == DDL_OK; i++) {
        status = i != c->rank ? ddl__link_choose(c, i, offers + i * DDL__ENDPOINTS_MAX) : DDL_OK;
    }
    c->tuning.model.oversubscription = ddl__crowding(c, table);
    return status;
}

/* Tells the others about this rank, and reads what they told. wire: a blob of each rank. */
static ddl_status ddl__blobs_exchange(ddl_context *c, uint8_t *wire, ddl__blob *table) {
    ddl__blob mine;
    uint8_t told[DDL__BLOB_BYTES];
    uint64_t strangers = 0;
    c->board_fd = ddl__board_make(c->world_size);
    ddl__blob_fill(c, &mine);
    ddl__blob_write(&mine, told);
    ddl_status status = ddl__rendezvous(&c->settings, &c->base, told, sizeof told, wire, &strangers, &c->error);
    c->stats.strangers_refused += strangers;
    for (int32_t i = 0; status == DDL_OK && i < c->world_size; i++) {
        ddl__blob_read(wire + (size_t)i * DDL__BLOB_BYTES, &table[i]);
    }
    return status;
}

static ddl_status ddl__meet(ddl_context *c) {
    size_t world = (size_t)c->world_size;
    ddl__blob *table = ddl__alloc_array(&c->base, world, sizeof *table);
    uint8_t *wire = ddl__alloc_array(&c->base, world, DDL__BLOB_BYTES);
    ddl__reach *offers = ddl__alloc_array(&c->base, world * DDL__ENDPOINTS_MAX, sizeof *offers);
    ddl_status status = DDL_OK;
    c->links = ddl__alloc_array(&c->base, world, sizeof *c->links);
    if (table == NULL || wire == NULL || offers == NULL || c->links == NULL) {
        status = ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
    }
    for (int32_t i = 0; c->links != NULL && i < c->world_size; i++) {
        c->links[i].pidfd = -1;
    }
    status = status == DDL_OK ? ddl__blobs_exchange(c, wire, table) : status;
    status = status == DDL_OK ? ddl__links_make(c, table, offers) : status;
    ddl__free(&c->base, offers);
    ddl__free(&c->base, wire);
    ddl__free(&c->base, table);
    return status;
}

/* >>init */

static void ddl__register_handlers(ddl_context *c) {
    c->handlers[DDL__FRAME_P2P] = (ddl__handler){ddl__on_p2p, ddl__place_p2p, ddl__placed_p2p};
    c->handlers[DDL__FRAME_RTS] = (ddl__handler){.deliver = ddl__on_rts};
    c->handlers[DDL__FRAME_CTS] = (ddl__handler){.deliver = ddl__on_cts};
    c->handlers[DDL__FRAME_DATA] = (ddl__handler){ddl__on_data, ddl__place_data, ddl__placed_data};
    c->handlers[DDL__FRAME_COLL] = (ddl__handler){ddl__on_coll, ddl__place_coll, ddl__placed_coll};
    c->handlers[DDL__FRAME_CREDIT] = (ddl__handler){.deliver = ddl__on_credit};
    c->handlers[DDL__FRAME_QUERY] = (ddl__handler){.deliver = ddl__on_query};
    c->handlers[DDL__FRAME_STATUS] = (ddl__handler){.deliver = ddl__on_status};
    c->handlers[DDL__FRAME_MISMATCH] = (ddl__handler){.deliver = ddl__on_mismatch};
    c->handlers[DDL__FRAME_DEAD] = (ddl__handler){.deliver = ddl__on_dead};
    c->handlers[DDL__FRAME_BYE] = (ddl__handler){.deliver = ddl__on_bye};
    c->handlers[DDL__FRAME_AGREE] = (ddl__handler){.deliver = ddl__on_agree};
    c->handlers[DDL__FRAME_ABORT] = (ddl__handler){.deliver = ddl__on_abort};
}

static ddl_status ddl__context_parts(ddl_context *c) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->error_lock, NULL);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->groups = ddl__alloc(&c->base, sizeof *c->groups);
    c->requests = ddl__alloc(&c->base, sizeof *c->requests);
    c->ops = ddl__alloc(&c->base, sizeof *c->ops);
    if (c->groups == NULL || c->requests == NULL || c->ops == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for a context");
    }
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data = {.u32 = UINT32_MAX}};
    if (c->epoll_fd < 0 || c->wake_fd < 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->wake_fd, &event) != 0) {
        return ddl__error(c, DDL_ERR_SYSTEM, "ddl_init: no file descriptors for a context: %s; see `ulimit -n`",
                          strerror(errno));
    }
    ddl__register_handlers(c);
    return DDL_OK;
}

static ddl_status ddl__load_plugins(ddl_context *c) {
    static const char *const built_in[] = {"tcp", NULL};
    ddl_host host = ddl__host_table(c);
    ddl__plugin_asked asked[2] = {{c->settings.plugins, "ddl_config.plugins or DDL_PLUGINS"}, {NULL, NULL}};
    ddl__loader_params params = {.host = &host,
                                 .asked = asked,
                                 .asked_count = 1,
                                 .built_in = built_in,
                                 .path = c->settings.plugin_path,
                                 .libdir = ddl__plugin_libdir(),
                                 .statics = ddl__plugin_statics()};
    return ddl__loader_open(&c->loader, &c->base, &params, &c->error);
}

/* DDL_<NAME>_... belongs to plugin <name>. */
static bool ddl__is_plugin_setting(const ddl_context *c, const char *variable) {
    for (const ddl__plugin_record *p = c->loader.loaded; p != NULL; p = p->next) {
        size_t length = strlen(p->name);
        if (strncasecmp(variable + 4, p->name, length) == 0 && variable[4 + length] == '_') {
            return true;
        }
    }
    return false;
}

/* One rank of a host says it, the others only to who wants to know everything. */
static void ddl__warn_of_unknown(const ddl_context *c) {
    const ddl__launch *l = &c->settings.launch;
    bool first = l->local_rank >= 0 ? l->local_rank == 0 : l->rank == 0;
    for (char **line = environ; line != NULL && *line != NULL; line++) {
        size_t length = ddl__setting_unknown(*line);
        if (length > 0 && !ddl__is_plugin_setting(c, *line)) {
            ddl__setting_warn(&c->base, first ? DDL_LOG_WARN : DDL_LOG_DEBUG, *line, length);
        }
    }
}

static ddl_status ddl__world_make(ddl_context *c) {
    int32_t *ranks = ddl__alloc_array(&c->base, (size_t)c->world_size, sizeof *ranks);
    if (ranks == NULL) {
        return ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
    }
    for (int32_t i = 0; i < c->world_size; i++) {
        ranks[i] = i;
    }
    c->world = ddl__group_new(c, ranks, c->world_size, 0, 0, "world");
    ddl__free(&c->base, ranks);
    return c->world != NULL ? DDL_OK : ddl__error(c, DDL_ERR_NOMEM, "ddl_init: no memory for %d ranks", c->world_size);
}

static ddl_status ddl__join(ddl_context *c) {
    c->rank = c->settings.launch.rank;
    c->world_size = c->settings.launch.world;
    c->cores = DDL__MAX(c->settings.cores, 1);
    c->job = c->settings.job_id;
    c->tuning.model = ddl__model_default;
    c->tuning.deterministic = c->settings.deterministic;
    if (c->settings.algorithm != NULL) {
        DDL__TRY(ddl__tune_set(c, &c->tuning, c->settings.algorithm, "ddl_init: DDL_ALGO, or algorithm of ddl_config"));
    }
    DDL__TRY(ddl__load_plugins(c));
    ddl__warn_of_unknown(c);
    if (c->world_size > 1) {
        DDL__TRY(ddl__need_fds(3 * c->world_size + 32, &c->error));
        ddl__pass_open(c);
        DDL__TRY(ddl__endpoints_open(c));
    }
    DDL__TRY(ddl__meet(c));
    DDL__TRY(ddl__world_make(c));
    c->joined = true;
    return ddl__greet(c);
}

/* Frees what is left of a closed context: the handles. */
static void ddl__context_destroy(ddl_context *c) {
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL;) {
        ddl_group *next = g->next;
        ddl__free(&c->base, g);
        g = next;
    }
    for (int32_t i = 0; c->requests != NULL && i < c->requests->chunk_count; i++) {
        ddl__free(&c->base, c->requests->chunks[i]);
    }
    if (c->requests != NULL) {
        ddl__free(&c->base, c->requests->chunks);
    }
    ddl__free(&c->base, c->requests);
    ddl__free(&c->base, c->groups);
    ddl__free(&c->base, c->ops);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->error_lock);
    pthread_cond_destroy(&c->changed);
    if (c->own_page != NULL) {
        munmap((void *)(uintptr_t)c->own_page, (size_t)sysconf(_SC_PAGESIZE));
    }
    ddl__base base = c->base;
    ddl__free(&base, c);
}

/* Requests that nobody waited for end too. Those with parts first: they free their parts. */
static void ddl__requests_free(ddl_context *c) {
    ddl__requests *q = c->requests;
    for (int32_t pass = 0; q != NULL && pass < 2; pass++) {
        for (int32_t i = 0; i < q->chunk_count * DDL__REQUESTS_CHUNK; i++) {
            ddl_request *r = &q->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
            if (r->state != DDL__REQUEST_FREE && (pass == 1 || r->ops->release != NULL)) {
                ddl__request_release(r);
            }
        }
    }
}

static void ddl__context_close_fds(ddl_context *c) {
    if (c->epoll_fd >= 0) {
        close(c->epoll_fd);
    }
    if (c->wake_fd >= 0) {
        close(c->wake_fd);
    }
    c->epoll_fd = c->wake_fd = -1;
}

/* Closes everything that works; what stays is a shell, so that handles which are used too long are known as such. */
static void ddl__context_close(ddl_context *c) {
    ddl__pass_close(c);
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__native_close(g);
        }
    }
    while (c->lent != NULL) {
        ddl__lent *lent = c->lent;
        c->lent = lent->next;
        ddl__lent_free(c, lent);
    }
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        c->endpoints[i].table->close(c->endpoints[i].self);
    }
    c->endpoint_count = 0;
    ddl__requests_free(c); /* before the groups: persistent ones hold plans of theirs */
    for (ddl_group *g = c->groups != NULL ? c->groups->first : NULL; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__group_bury(g);
        }
    }
    for (int32_t i = 0; c->links != NULL && i < c->world_size; i++) {
        if (c->links[i].pidfd >= 0) {
            close(c->links[i].pidfd);
        }
    }
    ddl__free(&c->base, c->links);
    c->links = NULL;
    ddl__board_close(c);
    while (c->notes != NULL) {
        ddl__note *n = c->notes;
        c->notes = n->next;
        ddl__free(&c->base, n);
    }
    while (c->landings != NULL) {
        ddl__landing *l = c->landings;
        c->landings = l->next;
        ddl__free(&c->base, l);
    }
    while (c->ops != NULL && c->ops->first != NULL) {
        ddl__user_op_release(c, c->ops->first);
    }
    ddl__scratch_free_all(c);
    ddl__loader_close(&c->loader);
    ddl__settings_free(&c->base, &c->settings);
    ddl__context_close_fds(c);
}

/* The only variable of ddl's that belongs to no context: the shells of the contexts that ended last. A handle of one of
 * them, the context's own or its world, groups and requests, is still memory that says so. */
enum { DDL__ENDED = 16 };
static struct ddl__ended {
    _Atomic(ddl_context *) last[DDL__ENDED];
    atomic_uint count;
} ddl__ended;

/* The last handle that the caller had to free is gone. A program that brought its own allocator gets all memory back
 * now: it may end with the program's use of ddl. */
static void ddl__context_end(ddl_context *c) {
    if (c->base.allocator.free == NULL) {
        /* relaxed: any slot will do */
        uint32_t slot = atomic_fetch_add_explicit(&ddl__ended.count, 1, memory_order_relaxed) % DDL__ENDED;
        /* release: whoever takes this shell out sees all of it; acquire: so do we with the older one */
        c = atomic_exchange_explicit(&ddl__ended.last[slot], c, memory_order_acq_rel);
    }
    if (c != NULL) {
        ddl__context_destroy(c);
    }
}

static void ddl__init_failed(const ddl_config *config, const ddl__base *base, const ddl__sentence *why) {
    ddl__log(base, DDL_LOG_WARN, "%s", why->text);
    if (config != NULL && config->error_text != NULL && config->error_bytes > 0) {
        snprintf(config->error_text, config->error_bytes, "%s", why->text);
    }
}

DDL_API ddl_status ddl_init(const ddl_config *config, ddl_context **out_context) {
    if (out_context == NULL) {
        return DDL_ERR_ARG;
    }
    *out_context = NULL;
    ddl__base base = {.log_level = DDL_LOG_WARN, .rank = -1};
    ddl__settings settings;
    ddl__sentence why = {0};
    ddl_status status = ddl__settings_read(config, &base, &settings, &why);
    if (status < 0) {
        ddl__init_failed(config, &base, &why);
        return status;
    }
    ddl_context *c = ddl__alloc(&base, sizeof *c);
    if (c == NULL) {
        ddl__fail(&why, DDL_ERR_NOMEM, "ddl_init: no memory for a context");
        ddl__settings_free(&base, &settings);
        ddl__init_failed(config, &base, &why);
        return DDL_ERR_NOMEM;
    }
    c->base = base;
    c->settings = settings;
    c->pid = getpid();
    c->clock = (ddl__clock){ddl__ticks(), ddl__now_ns(), 0};
    ddl__own_page_make(c);
    c->refs = 1;
    c->epoll_fd = c->wake_fd = c->board_fd = c->pass_fd = -1;
    status = ddl__context_parts(c);
    ddl__lock(c);
    if (status == DDL_OK) {
        status = ddl__join(c);
    }
    ddl__unlock(c);
    if (status < 0) {
        ddl__init_failed(config, &c->base, &c->error);
        c->finalized = true;
        ddl__context_close(c);
        ddl__context_destroy(c);
        return status;
    }
    *out_context = c;
    return DDL_OK;
}

/* >>leaving */

/* Ends all requests that still run; nothing of the callers' memory is used after this. */
static void ddl__end_requests(ddl_context *c, ddl_status status, const char *text) {
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        if (g->magic == DDL__GROUP_MAGIC) {
            ddl__group_break(g, status, "%s", text);
        }
    }
    for (int32_t i = 0; i < c->requests->chunk_count * DDL__REQUESTS_CHUNK; i++) {
        ddl_request *r = &c->requests->chunks[i / DDL__REQUESTS_CHUNK][i % DDL__REQUESTS_CHUNK];
        if (r->state == DDL__REQUEST_ACTIVE) {
            r->ops->abandon(c, r);
            if (r->state == DDL__REQUEST_ACTIVE) {
                ddl__request_fail(r, status, "%s", text);
            }
        }
    }
    ddl__wake(c);
}

static void ddl__thread_end(ddl_context *c) {
    if (c->has_thread) {
        c->thread_stop = true;
        ddl__wake(c);
        ddl__unlock(c);
        pthread_join(c->thread, NULL);
        ddl__lock(c);
        c->has_thread = false;
    }
}

static void ddl__context_unref(ddl_context *c) {
    int32_t refs = --c->refs;
    ddl__unlock(c);
    if (refs == 0) {
        ddl__context_end(c);
    }
}

DDL_API ddl_status ddl_finalize(ddl_context **context) {
    if (context == NULL || *context == NULL) {
        return DDL_OK;
    }
    ddl_context *c = *context;
    DDL__TRY(ddl__enter(c));
    *context = NULL;
    c->finalized = true; /* from here nothing new begins, so that the threads that wait can be waited for */
    ddl__end_requests(c, DDL_ERR_STATE, "the context was finalized while the operation was running");
    ddl__thread_end(c);
    ddl__board_leave(c);
    ddl__say_goodbye(c);
    ddl__poll(c, -1);
    while (c->cond_waiters > 0 || c->polling) { /* threads inside a wait leave it first: their requests have ended */
        ddl__wake(c);
        ddl__unlock(c);
        sched_yield();
        ddl__lock(c);
    }
    ddl__context_close(c);
    ddl__context_unref(c);
    return DDL_OK;
}

DDL_API ddl_status ddl_group_free(ddl_group **group) {
    if (group == NULL || *group == NULL) {
        return DDL_OK;
    }
    ddl_group *g = *group;
    ddl_context *c = g->context;
    if ((g->magic != DDL__GROUP_MAGIC && g->magic != DDL__GROUP_FREED) || ddl__is_forked(c)) {
        return g->magic == DDL__GROUP_MAGIC ? DDL_ERR_FORK : DDL_ERR_ARG;
    }
    ddl__lock(c);
    if (!g->user_holds || g->outstanding > 0) {
        ddl_status status =
            g == c->world    ? ddl__error(c, DDL_ERR_ARG, "ddl_group_free: the world belongs to the context")
            : !g->user_holds ? ddl__error(c, DDL_ERR_STATE, "ddl_group_free: group \"%s\" was freed before", g->name)
                             : ddl__error(c, DDL_ERR_STATE,
                                          "ddl_group_free: group \"%s\" has %d requests that were not "
                                          "waited for",
                                          g->name, g->outstanding);
        ddl__unlock(c);
        return status;
    }
    g->user_holds = false;
    if (g->magic == DDL__GROUP_MAGIC) {
        ddl__group_bury(g);
    }
    ddl__group_forget(c);
    *group = NULL;
    ddl__context_unref(c);
    return DDL_OK;
}

/* >>abort */

static void ddl__abort_here(ddl_context *c, const char *text) {
    if (!c->aborted) {
        c->aborted = true;
        snprintf(c->abort_text, sizeof c->abort_text, "%s", text);
        ddl__end_requests(c, DDL_ERR_ABORTED, c->abort_text);
    }
}

static ddl_status ddl__on_abort(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    ddl__reader r = ddl__reader_of(payload, f->bytes);
    char text[256];
    ddl__get_u32(&r);
    ddl__get_string(&r, text, sizeof text);
    if (r.bad) {
        return DDL_ERR_CORRUPT;
    }
    if (!c->aborted) {
        ddl__abort_here(c, text);
        ddl__flood(c, (ddl__frame){.type = DDL__FRAME_ABORT}, c->rank, text, peer);
    }
    return DDL_OK;
}

DDL_API ddl_status ddl_abort(ddl_context *context, const char *reason) {
    DDL__TRY(ddl__enter(context));
    char text[256];
    snprintf(text, sizeof text, "rank %d aborted the job: %.180s", context->rank,
             reason != NULL ? reason : "no reason given");
    if (!context->aborted) {
        ddl__abort_here(context, text);
        for (int32_t i = 0; i < context->world_size; i++) { /* all, connected or not: nobody may be left waiting */
            context->links[i].connected = i != context->rank;
        }
        ddl__flood(context, (ddl__frame){.type = DDL__FRAME_ABORT}, context->rank, text, -1);
        ddl__poll(context, -1);
    }
    ddl__unlock(context);
    return DDL_OK;
}

/* >>asking */

DDL_API int32_t ddl_version(void) {
    return DDL_VERSION_MAJOR * 10000 + DDL_VERSION_MINOR * 100 + DDL_VERSION_PATCH;
}

DDL_API int32_t ddl_feature(const char *name) {
    if (name == NULL) {
        return 0;
    }
#ifndef DDL_NO_PLUGINS
    if (strcmp(name, "plugins") == 0) {
        return 1;
    }
#endif
    for (const ddl__plugin_static *p = ddl__plugin_statics(); p->name != NULL; p++) {
        if (strcmp(name, p->name) == 0) {
            return 1;
        }
    }
    return strcmp(name, "tcp") == 0;
}

DDL_API ddl_group *ddl_world(ddl_context *context) { return context != NULL ? context->world : NULL; }

DDL_API ddl_status ddl_stats_get(ddl_context *context, ddl_stats *out_stats) {
    if (out_stats == NULL) {
        return ddl__refuse(context, "ddl_stats_get", "out_stats");
    }
    DDL__TRY(ddl__enter(context));
    *out_stats = context->stats;
    out_stats->memory_bytes = context->base.memory;
    out_stats->memory_peak_bytes = context->base.memory_peak;
    for (int32_t i = 0; i < context->endpoint_count; i++) {
        out_stats->transports[i] = context->endpoints[i].stats;
        out_stats->transports[i].name = context->endpoints[i].plugin->name;
    }
    for (int32_t i = 0; i < context->world_size; i++) {
        const ddl__link *l = &context->links[i];
        out_stats->peers_connected += l->connected;
        if (l->endpoint != NULL) {
            out_stats->transports[l->endpoint - context->endpoints].peers++;
        }
    }
    ddl__unlock(context);
    return DDL_OK;
}

DDL_API ddl_status ddl_progress(ddl_context *context) {
    DDL__TRY(ddl__enter(context));
    if (!context->polling) {
        ddl__poll(context, -1);
        ddl__look(context, ddl__now_ns());
    }
    ddl__unlock(context);
    return DDL_OK;
}

/* The oldest record that was not shown yet, of all groups; each keeps its own place. */
static ddl__flight *ddl__record_next(ddl_context *c, ddl_group **out_group) {
    ddl__flight *oldest = NULL;
    for (ddl_group *g = c->groups->first; g != NULL; g = g->next) {
        ddl__flight *r = g->magic == DDL__GROUP_MAGIC ? ddl__record_of(g, g->shown + 1) : NULL;
        if (r != NULL && (oldest == NULL || r->order < oldest->order)) {
            oldest = r;
            *out_group = g;
        }
    }
    if (oldest != NULL) {
        (*out_group)->shown++;
    }
    return oldest;
}

DDL_API size_t ddl_flight_record(ddl_context *context, char *out_text, size_t bytes) {
    if (ddl__enter(context) < 0) {
        return 0;
    }
    ddl__text text = {out_text, out_text != NULL ? bytes : 0, 0};
    for (ddl_group *g = context->groups->first; g != NULL; g = g->next) {
        g->shown = g->sequence > DDL__RECORDS ? g->sequence - DDL__RECORDS : 0;
    }
    ddl_group *g = NULL;
    for (ddl__flight *r = ddl__record_next(context, &g); r != NULL; r = ddl__record_next(context, &g)) {
        bool runs = r->status == DDL_IN_PROGRESS;
        uint64_t end = DDL__MAX(runs ? ddl__now_ns() : r->end_ns, r->start_ns); /* one clock is wrong by a little */
        ddl__text_add(&text, "%s #%u ", g->name, r->sequence);
        ddl__describe_record(g, r, &text);
        ddl__text_add(&text, " %s %.1f us\n", runs ? "running for" : ddl_status_name((ddl_status)r->status),
                      (double)(end - r->start_ns) / 1e3);
    }
    ddl__unlock(context);
    return text.used;
}

/* >>optim/vectors */
/* optim/vectors: what optimizers and encoders need of vectors beyond src/dtype: products that are rounded before they
 * are added, square roots, sums of squares. All are exact in the sense of IEEE 754, so that every level, every cut of
 * an array and every processor gives the same bits. Must not know: optimizers. */

/* Kernels take whole runs of this many elements; what is left over is padded (DDL__RUN of any level fits in it). */
#define DDL__RUN 16

/* Keeps the compiler from fusing a product with the addition after it: a fused one is rounded once instead of twice,
 * and only some processors have it. An empty asm costs nothing; where we do not know the name of the vector registers
 * the value goes through memory. */
#if defined(__x86_64__)
#define DDL__ROUNDED(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define DDL__ROUNDED(x) __asm__("" : "+w"(x))
#else
#define DDL__ROUNDED(x) __asm__("" : "+m"(x))
#endif

/* r = x * y, rounded. r may be x; y may be a scalar. */
#define DDL__MUL(r, x, y)                                                                                              \
    do {                                                                                                               \
        (r) = (x) * (y);                                                                                               \
        DDL__ROUNDED(r);                                                                                               \
    } while (0)

#if defined(__x86_64__)
#define DDL__SQRT_16(x) ((ddl__f32_v16)_mm_sqrt_ps((__m128)(x)))
#define DDL__SQRT_32(x) ((ddl__f32_v32)_mm256_sqrt_ps((__m256)(x)))
#define DDL__SQRT_64(x) ((ddl__f32_v64)_mm512_sqrt_ps((__m512)(x)))
#elif defined(__aarch64__)
#define DDL__SQRT_16(x) ((ddl__f32_v16)vsqrtq_f32((float32x4_t)(x)))
#else
#define DDL__SQRT_16(x) ddl__sqrt_lanes(x)
#endif

/* The square root in double, within a last place, without libm (the library does not link it): a first guess that
 * halves the exponent, then Newton's iteration. Rounded to float it is exact: no float has a root that near to the
 * middle of two floats. */
static inline double ddl__sqrt(double x) {
    if (!(x > 0) || x > 1.7e308) {
        return x < 0 ? (x - x) / (x - x) : x;
    }
    uint64_t bits;
    double guess;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits >> 1) + ((uint64_t)1023 << 51);
    memcpy(&guess, &bits, sizeof guess);
    for (int i = 0; i < 6; i++) {
        guess = 0.5 * (guess + x / guess);
    }
    return guess;
}

static inline ddl__f32_v16 ddl__sqrt_lanes(ddl__f32_v16 x) {
    for (int i = 0; i < 4; i++) {
        x[i] = (float)ddl__sqrt((double)x[i]);
    }
    return x;
}

/* Floats that become doubles of twice the width: half a vector of each width. */
typedef float ddl__f32_h16 DDL__VECTOR(8);
typedef float ddl__f32_h32 DDL__VECTOR(16);
typedef float ddl__f32_h64 DDL__VECTOR(32);

/* lanes[i % 8] += x[i]^2 for count elements, a multiple of DDL__RUN. Eight lanes whatever the width, so that the order
 * of additions is the same at every level; the square of a float is exact in double, so fusing does no harm. */
#define DDL__SQUARES_STEP(W, j)                                                                                        \
    if ((j) < 64 / (W)) {                                                                                              \
        ddl__f32_h##W half = *(const ddl__f32_h##W *)(const void *)(x + i + (j) * ((W) / 8));                          \
        ddl__f64_v##W wide = __builtin_convertvector(half, ddl__f64_v##W);                                             \
        sum[j] += wide * wide;                                                                                         \
    }
#define DDL__DEFINE_SQUARES(L, target, W)                                                                              \
    target static void ddl__squares_##L(double *lanes, const float *x, int64_t count) {                                \
        ddl__f64_v##W sum[4];                                                                                          \
        memset(sum, 0, sizeof sum);                                                                                    \
        memcpy(sum, lanes, 8 * sizeof(double));                                                                        \
        for (int64_t i = 0; i < count; i += 8) {                                                                       \
            DDL__SQUARES_STEP(W, 0)                                                                                    \
            DDL__SQUARES_STEP(W, 1)                                                                                    \
            DDL__SQUARES_STEP(W, 2)                                                                                    \
            DDL__SQUARES_STEP(W, 3)                                                                                    \
        }                                                                                                              \
        memcpy(lanes, sum, 8 * sizeof(double));                                                                        \
        DDL__LEAVE_##L;                                                                                                \
    }
DDL__DEFINE_SQUARES(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_SQUARES(avx2, DDL__AVX2, 32)
DDL__DEFINE_SQUARES(avx512, DDL__AVX512, 64)
#endif

/* The kernel of a level out of three; levels that a processor family lacks are not named. */
#if defined(__x86_64__)
#define DDL__AT_LEVEL(level, name)                                                                                     \
    ((level) == DDL__CPU_AVX512 ? name##_avx512 : (level) == DDL__CPU_AVX2 ? name##_avx2 : name##_portable)
#else
#define DDL__AT_LEVEL(level, name) ((void)(level), name##_portable)
#endif

/* Sum of squares of one block: eight lanes, added in a fixed order. */
static inline double ddl__block_squares(ddl__cpu level, const float *x, int64_t count) {
    double lanes[8] = {0};
    float rest[DDL__RUN] = {0};
    int64_t whole = count - count % DDL__RUN;
    DDL__AT_LEVEL(level, ddl__squares)(lanes, x, whole);
    memcpy(rest, x + whole, (size_t)(count - whole) * sizeof(float));
    DDL__AT_LEVEL(level, ddl__squares)(lanes, rest, DDL__RUN);
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* Sums go block by block, so that their error does not grow with the array and partial sums of one cut are the same
 * wherever they are made. 16 KiB: a block and a second one of scratch stay in the first-level cache. */
#define DDL__BLOCK 4096

static inline double ddl__sum_squares_at(ddl__cpu level, const float *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i += DDL__BLOCK) {
        sum += ddl__block_squares(level, x + i, DDL__MIN(count - i, DDL__BLOCK));
    }
    return sum;
}

/* The sum of x[i]^2 in double: for norms and for clipping. */
static inline double ddl__sum_squares(const float *x, int64_t count) {
    return ddl__sum_squares_at(ddl__cpu_level(), x, count);
}

/* >>optim/kernels */
/* optim/kernels: one step of each optimizer over arrays, in vectors. Formulas and papers stand in api.h.
 * Must not know: tensors, shards, configs. */

/* The numbers of one step, rounded once from double. */
typedef struct ddl__optim_scalars {
    float rate;          /* what the update is multiplied by */
    float decay;         /* of the weight, added to the gradient (LAMB: to the update) */
    float keep;          /* AdamW: what the weight is multiplied by */
    float beta1, fresh1; /* the momentum, or beta1; and 1 - beta1 */
    float beta2, fresh2;
    float unbias1; /* LAMB: 1 / (1 - beta1^t); for Adam it is inside rate */
    float unbias2; /* 1 / sqrt(1 - beta2^t) */
    float epsilon;
} ddl__optim_scalars;

/* The arrays of one step: weight, gradient, first and second moment, and (LAMB) where the update goes. */
typedef struct ddl__optim_streams {
    float *w;
    const float *g;
    float *m, *v, *r;
} ddl__optim_streams;

/* count is a multiple of DDL__RUN. The arrays overlap nowhere. */
typedef void (*ddl__optim_fn)(const ddl__optim_scalars *scalars, const ddl__optim_streams *streams, int64_t count);

#define DDL__GET(W, x) (*(const ddl__f32_v##W *)(const void *)(s.x + i))
#define DDL__PUT(W, x, value) (*(ddl__f32_v##W *)(void *)(s.x + i) = (value))

/* g + wd * w, which the weight decay of all but AdamW and LAMB begins with. */
#define DDL__OPTIM_DECAYED(W)                                                                                          \
    ddl__f32_v##W w = DDL__GET(W, w), g = DDL__GET(W, g), t;                                                           \
    DDL__MUL(t, w, k.decay);                                                                                           \
    g += t

#define DDL__OPTIM_SGD(W)                                                                                              \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

#define DDL__OPTIM_MOMENTUM(W)                                                                                         \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__MUL(t, DDL__GET(W, m), k.beta1);                                                                              \
    g += t;                                                                                                            \
    DDL__PUT(W, m, g);                                                                                                 \
    DDL__MUL(t, g, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

#define DDL__OPTIM_NESTEROV(W)                                                                                         \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    ddl__f32_v##W m;                                                                                                   \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    m += g;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__MUL(t, m, k.beta1);                                                                                           \
    t += g;                                                                                                            \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

/* rate holds the trust ratio too: it goes into the momentum, not onto it. */
#define DDL__OPTIM_LARS(W)                                                                                             \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    ddl__f32_v##W m;                                                                                                   \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.rate);                                                                                            \
    m += t;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__PUT(W, w, w - m);

/* Both moments take in g. */
#define DDL__OPTIM_MOMENTS(W)                                                                                          \
    ddl__f32_v##W m, v;                                                                                                \
    DDL__MUL(m, DDL__GET(W, m), k.beta1);                                                                              \
    DDL__MUL(t, g, k.fresh1);                                                                                          \
    m += t;                                                                                                            \
    DDL__PUT(W, m, m);                                                                                                 \
    DDL__MUL(t, g, g);                                                                                                 \
    DDL__MUL(t, t, k.fresh2);                                                                                          \
    DDL__MUL(v, DDL__GET(W, v), k.beta2);                                                                              \
    v += t;                                                                                                            \
    DDL__PUT(W, v, v)

/* t = sqrt(v / (1 - beta2^t)) + epsilon */
#define DDL__OPTIM_ROOT(W, t, v)                                                                                       \
    do {                                                                                                               \
        (t) = DDL__SQRT_##W(v);                                                                                        \
        DDL__MUL(t, t, k.unbias2);                                                                                     \
        (t) += k.epsilon;                                                                                              \
    } while (0)

/* Adam and AdamW: the one has keep 1, the other decay 0. */
#define DDL__OPTIM_ADAM(W)                                                                                             \
    DDL__OPTIM_DECAYED(W);                                                                                             \
    DDL__OPTIM_MOMENTS(W);                                                                                             \
    DDL__OPTIM_ROOT(W, t, v);                                                                                          \
    DDL__MUL(m, m, k.rate);                                                                                            \
    DDL__MUL(w, w, k.keep);                                                                                            \
    DDL__PUT(W, w, w - m / t);

/* r = m^ / (sqrt(v^) + epsilon) + wd * w, from w, m and v: the same bits each time. */
#define DDL__OPTIM_UPDATE(W, w, m, v, t)                                                                               \
    do {                                                                                                               \
        DDL__OPTIM_ROOT(W, t, v);                                                                                      \
        DDL__MUL(m, m, k.unbias1);                                                                                     \
        (t) = (m) / (t);                                                                                               \
        DDL__MUL(m, w, k.decay);                                                                                       \
        (t) += (m);                                                                                                    \
    } while (0)

/* LAMB: the moments first, the update only for its norm; then, with both norms known, the weight. Doing the update
 * twice costs less than storing it. */
#define DDL__OPTIM_LAMB_MOMENTS(W)                                                                                     \
    ddl__f32_v##W w = DDL__GET(W, w), g = DDL__GET(W, g), t;                                                           \
    DDL__OPTIM_MOMENTS(W);                                                                                             \
    DDL__OPTIM_UPDATE(W, w, m, v, t);                                                                                  \
    DDL__PUT(W, r, t);
#define DDL__OPTIM_LAMB(W)                                                                                             \
    ddl__f32_v##W w = DDL__GET(W, w), m = DDL__GET(W, m), v = DDL__GET(W, v), t;                                       \
    DDL__OPTIM_UPDATE(W, w, m, v, t);                                                                                  \
    DDL__MUL(t, t, k.rate);                                                                                            \
    DDL__PUT(W, w, w - t);

/* Scalars and pointers are copied, because a store into an array may alias anything behind a pointer. */
#define DDL__DEFINE_OPTIM(L, target, W, name, BODY)                                                                    \
    target static void ddl__optim_##name##_##L(const ddl__optim_scalars *scalars, const ddl__optim_streams *streams,   \
                                               int64_t count) {                                                        \
        const ddl__optim_scalars k = *scalars;                                                                         \
        const ddl__optim_streams s = *streams;                                                                         \
        for (int64_t i = 0; i < count; i += (W) / 4) {                                                                 \
            BODY(W)                                                                                                    \
        }                                                                                                              \
        DDL__LEAVE_##L;                                                                                                \
    }
#define DDL__DEFINE_OPTIMS(L, target, W)                                                                               \
    DDL__DEFINE_OPTIM(L, target, W, sgd, DDL__OPTIM_SGD)                                                               \
    DDL__DEFINE_OPTIM(L, target, W, momentum, DDL__OPTIM_MOMENTUM)                                                     \
    DDL__DEFINE_OPTIM(L, target, W, nesterov, DDL__OPTIM_NESTEROV)                                                     \
    DDL__DEFINE_OPTIM(L, target, W, adam, DDL__OPTIM_ADAM)                                                             \
    DDL__DEFINE_OPTIM(L, target, W, lars, DDL__OPTIM_LARS)                                                             \
    DDL__DEFINE_OPTIM(L, target, W, lamb_moments, DDL__OPTIM_LAMB_MOMENTS)                                             \
    DDL__DEFINE_OPTIM(L, target, W, lamb, DDL__OPTIM_LAMB)
DDL__DEFINE_OPTIMS(portable, , 16)
#if defined(__x86_64__)
DDL__DEFINE_OPTIMS(avx2, DDL__AVX2, 32)
DDL__DEFINE_OPTIMS(avx512, DDL__AVX512, 64)
#endif

/* Runs a kernel on any count: what is less than a run goes through padded copies, so that the last elements get the
 * bits they would get in the middle. Arrays that a kernel does not use are NULL. */
static inline void ddl__optim_run(ddl__optim_fn kernel, const ddl__optim_scalars *scalars, ddl__optim_streams s,
                                  int64_t count) {
    int64_t whole = count - count % DDL__RUN;
    size_t rest = (size_t)(count - whole) * sizeof(float);
    kernel(scalars, &s, whole);
    if (rest == 0) {
        return;
    }
    float pad[5][DDL__RUN] = {{0}};
    const float *arrays[5] = {s.w, s.g, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (arrays[a] != NULL) {
            memcpy(pad[a], arrays[a] + whole, rest);
        }
    }
    kernel(scalars, &(ddl__optim_streams){pad[0], pad[1], pad[2], pad[3], pad[4]}, DDL__RUN);
    float *written[5] = {s.w, NULL, s.m, s.v, s.r};
    for (int a = 0; a < 5; a++) {
        if (written[a] != NULL) {
            memcpy(written[a] + whole, pad[a], rest);
        }
    }
}

/* >>optim/optim */
/* optim/optim: optimizers as the rooms above use them: check a config, size the state, take a step on a part.
 * Must not know: ranks, servers, or where a gradient comes from.
 *
 *     ddl__optim_init(sentence, &config, &optimizer)                checks, fills in the defaults
 *     state = zeroed floats, ddl__optim_slots(&optimizer) per element
 *     elementwise kinds:   ddl__optim_step(&optimizer, &part, NULL)
 *     LARS and LAMB:       ddl__optim_sums(&optimizer, &part, sums)   of each part, once per step
 *                          add the sums of all parts of the tensor, in a fixed order
 *                          ddl__optim_step(&optimizer, &part, sums)
 * With the same part sums the parts of a tensor get the same bits as the whole. */

static inline const char *ddl__optim_name(ddl_optimizer_kind kind) {
    static const char *const names[] = {"SGD", "momentum", "Nesterov", "Adam", "AdamW", "LARS", "LAMB", "fn"};
    return (unsigned)kind < DDL__COUNT_OF(names) ? names[kind] : "?";
}

/* Floats of state per element. */
static inline int32_t ddl__optim_slots(const ddl_optimizer *optimizer) {
    switch (optimizer->kind) {
    case DDL_SGD: return 0;
    case DDL_MOMENTUM:
    case DDL_NESTEROV:
    case DDL_LARS: return 1;
    case DDL_ADAM:
    case DDL_ADAMW:
    case DDL_LAMB: return 2;
    case DDL_OPTIMIZER_FN: return optimizer->state_slots;
    }
    return 0;
}

/* Whether a step needs the sums of ddl__optim_sums over the whole tensor. */
static inline bool ddl__optim_needs_sums(const ddl_optimizer *optimizer) {
    return optimizer->kind == DDL_LARS || optimizer->kind == DDL_LAMB;
}

/* A member in its range, after defaults. */
static inline ddl_status ddl__optim_range(ddl__sentence *sentence, const ddl_optimizer *o, const char *name,
                                          double value, double end) {
    if (value >= 0 && value < end) {
        return DDL_OK;
    }
    return ddl__fail(sentence, DDL_ERR_ARG, "optimizer %s: %s is %g; it must be at least 0 and below %g",
                     ddl__optim_name(o->kind), name, value, end);
}

static inline double ddl__or_default(double value, double otherwise) {
    return value == 0 ? otherwise : value;
}

/* Checks a config and writes it with all defaults filled in; *out is untouched on an error. */
static inline ddl_status ddl__optim_init(ddl__sentence *sentence, const ddl_optimizer *config, ddl_optimizer *out) {
    ddl_optimizer o = *config;
    if ((unsigned)o.kind > DDL_OPTIMIZER_FN) {
        return ddl__fail(sentence, DDL_ERR_ARG, "%d is not a kind of optimizer; see ddl_optimizer_kind", (int)o.kind);
    }
    if (o.kind == DDL_OPTIMIZER_FN && (o.fn == NULL || o.state_slots < 0 || o.state_slots > 64)) {
        return ddl__fail(sentence, DDL_ERR_ARG,
                         "a DDL_OPTIMIZER_FN optimizer needs fn, and 0 to 64 state_slots; this one has fn %s and %d",
                         o.fn == NULL ? "NULL" : "set", o.state_slots);
    }
    bool adam = o.kind == DDL_ADAM || o.kind == DDL_ADAMW || o.kind == DDL_LAMB;
    o.learning_rate = ddl__or_default(o.learning_rate, adam ? 0.001 : o.kind == DDL_LARS ? 0.1 : 0.01);
    o.momentum = o.momentum < 0 ? 0 : ddl__or_default(o.momentum, 0.9);
    o.beta1 = o.beta1 < 0 ? 0 : ddl__or_default(o.beta1, 0.9);
    o.beta2 = ddl__or_default(o.beta2, 0.999);
    o.epsilon = ddl__or_default(o.epsilon, o.kind == DDL_LAMB ? 1e-6 : 1e-8);
    o.trust = ddl__or_default(o.trust, o.kind == DDL_LARS ? 0.001 : 1);
    DDL__TRY(ddl__optim_range(sentence, &o, "learning_rate", o.learning_rate, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "momentum", o.momentum, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "beta1", o.beta1, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "beta2", o.beta2, 1));
    DDL__TRY(ddl__optim_range(sentence, &o, "epsilon", o.epsilon, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "weight_decay", o.weight_decay, 1e30));
    DDL__TRY(ddl__optim_range(sentence, &o, "trust", o.trust, 1e30));
    *out = o;
    return DDL_OK;
}

/* x^n for n >= 0 by squaring: libm is not linked, and its last bits differ from one libc to the next. */
static inline double ddl__power(double x, int64_t n) {
    double result = 1;
    for (; n > 0; n >>= 1, x *= x) {
        result = n & 1 ? result * x : result;
    }
    return result;
}

static inline ddl__optim_scalars ddl__optim_scalars_of(const ddl_optimizer *o, const ddl_optimizer_part *part) {
    double rate = part->learning_rate, unbias1 = 1 / (1 - ddl__power(o->beta1, part->step));
    bool adam = o->kind == DDL_ADAM || o->kind == DDL_ADAMW, moments = adam || o->kind == DDL_LAMB;
    double beta1 = moments ? o->beta1 : o->momentum;
    return (ddl__optim_scalars){
        .rate = (float)(adam ? rate * unbias1 : rate),
        .decay = (float)(o->kind == DDL_ADAMW ? 0 : o->weight_decay),
        .keep = (float)(o->kind == DDL_ADAMW ? 1 - rate * o->weight_decay : 1),
        .beta1 = (float)beta1,
        .fresh1 = (float)(1 - beta1),
        .beta2 = (float)o->beta2,
        .fresh2 = (float)(1 - o->beta2),
        .unbias1 = (float)unbias1,
        .unbias2 = (float)(1 / ddl__sqrt(1 - ddl__power(o->beta2, part->step))),
        .epsilon = (float)o->epsilon,
    };
}

static inline ddl__optim_streams ddl__optim_streams_of(const ddl_optimizer *o, const ddl_optimizer_part *part) {
    int32_t slots = ddl__optim_slots(o);
    return (ddl__optim_streams){part->param, part->grad, slots > 0 ? part->state : NULL,
                                slots > 1 ? part->state + part->state_stride : NULL, NULL};
}

static inline void ddl__lamb_sums(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                  double *sums) {
    float update[DDL__BLOCK];
    ddl__optim_scalars scalars = ddl__optim_scalars_of(o, part);
    for (int64_t i = 0; i < part->count; i += DDL__BLOCK) {
        ddl__optim_streams s = ddl__optim_streams_of(o, part);
        int64_t count = DDL__MIN(part->count - i, DDL__BLOCK);
        s = (ddl__optim_streams){s.w + i, s.g + i, s.m + i, s.v + i, update};
        ddl__optim_run(DDL__AT_LEVEL(level, ddl__optim_lamb_moments), &scalars, s, count);
        sums[0] += ddl__block_squares(level, s.w, count);
        sums[1] += ddl__block_squares(level, update, count);
    }
}

/* First half of a step of LARS and LAMB on a part: out_sums[0] = sum of w^2, out_sums[1] = sum of g^2 (LARS) or of the
 * update's squares (LAMB, whose moments take in the gradient here: call it once per step). Others: zeros. */
static inline void ddl__optim_sums_at(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                      double out_sums[2]) {
    out_sums[0] = out_sums[1] = 0;
    if (o->kind == DDL_LARS) {
        out_sums[0] = ddl__sum_squares_at(level, part->param, part->count);
        out_sums[1] = ddl__sum_squares_at(level, part->grad, part->count);
    } else if (o->kind == DDL_LAMB) {
        ddl__lamb_sums(level, o, part, out_sums);
    }
}

static inline void ddl__optim_sums(const ddl_optimizer *o, const ddl_optimizer_part *part, double out_sums[2]) {
    ddl__optim_sums_at(ddl__cpu_level(), o, part, out_sums);
}

/* What LARS and LAMB multiply the learning rate by. */
static inline double ddl__optim_trust(const ddl_optimizer *o, const double sums[2]) {
    double w = ddl__sqrt(sums[0]), other = ddl__sqrt(sums[1]);
    if (w == 0 || other == 0) {
        return 1;
    }
    return o->trust * w / (o->kind == DDL_LARS ? other + o->weight_decay * w : other);
}

static inline ddl__optim_fn ddl__optim_kernel(ddl__cpu level, ddl_optimizer_kind kind) {
    switch (kind) {
    case DDL_SGD: return DDL__AT_LEVEL(level, ddl__optim_sgd);
    case DDL_MOMENTUM: return DDL__AT_LEVEL(level, ddl__optim_momentum);
    case DDL_NESTEROV: return DDL__AT_LEVEL(level, ddl__optim_nesterov);
    case DDL_ADAM:
    case DDL_ADAMW: return DDL__AT_LEVEL(level, ddl__optim_adam);
    case DDL_LARS: return DDL__AT_LEVEL(level, ddl__optim_lars);
    case DDL_LAMB: return DDL__AT_LEVEL(level, ddl__optim_lamb);
    case DDL_OPTIMIZER_FN: break;
    }
    return NULL;
}

/* One step on a part of a tensor. sums: of the whole tensor, for LARS and LAMB; NULL for the others. The arrays of the
 * part overlap nowhere; count may be 0. optimizer comes from ddl__optim_init. */
static inline void ddl__optim_step_at(ddl__cpu level, const ddl_optimizer *o, const ddl_optimizer_part *part,
                                      const double *sums) {
    if (part->count <= 0) {
        return;
    }
    if (o->kind == DDL_OPTIMIZER_FN) {
        o->fn(o->user, part);
        return;
    }
    ddl_optimizer_part scaled = *part;
    if (ddl__optim_needs_sums(o)) {
        scaled.learning_rate *= ddl__optim_trust(o, sums);
    }
    ddl__optim_streams streams = ddl__optim_streams_of(o, part);
    if (o->kind == DDL_LAMB) {
        streams.g = NULL; /* it is in the moments already */
    }
    ddl__optim_scalars scalars = ddl__optim_scalars_of(o, &scaled);
    ddl__optim_run(ddl__optim_kernel(level, o->kind), &scalars, streams, part->count);
}

static inline void ddl__optim_step(const ddl_optimizer *o, const ddl_optimizer_part *part, const double *sums) {
    ddl__optim_step_at(ddl__cpu_level(), o, part, sums);
}

#endif /* DDL_IMPLEMENTATION */

/* >>licence
 * MIT License
 *
 * Copyright (c) 2026 The ddl authors
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy
 * of this software and associated documentation files (the "Software"), to deal
 * in the Software without restriction, including without limitation the rights
 * to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
 * copies of the Software, and to permit persons to whom the Software is
 * furnished to do so, subject to the following conditions:
 *
 * The above copyright notice and this permission notice shall be included in all
 * copies or substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
 * IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
 * FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
 * AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
 * LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
 * OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
 * SOFTWARE.
 */

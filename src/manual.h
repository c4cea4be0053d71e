/* ddl.h: distributed deep-learning communication in one C header.
 *
 * >>do_this
 * In one C file of the program:
 *
 *     #define DDL_IMPLEMENTATION
 *     #include "ddl.h"
 *
 * and #include "ddl.h" wherever else it is used, in C11 or C++17. Include it first in the file with the two lines, or
 * compile that file with -D_GNU_SOURCE. 64-bit Linux with glibc, gcc or clang; link with -lpthread -ldl where libc wants
 * it.
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
 *     torchrun --no_python --nnodes 2 --nproc_per_node 4 ...     on several (DDL_SECRET); mpirun, srun do as well
 *
 * Contents: grep '>>' ddl.h. Public: status handles tensor op context group request p2p coll collective
 * optimizer compression, then the plugin ABI, then the implementation.
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
 *     DDL_ENDED_FD                   a descriptor to read from which ranks have ended; ddlrun sets it
 *     DDL_PMIX_LIBRARY               the library by which ranks meet that a PMIx launcher started; libpmix.so.2
 *     DDL_INTERFACE                  the network interface to bind and to advertise
 *     DDL_ADVERTISE                  an address that peers reach this rank at, when it is not the bound one
 *     DDL_PORT_RANGE                 ports that ranks listen on, as 20000-20100; any free port without it
 *     DDL_TRANSPORTS                 transports in order of preference, as shm,tcp; all that load without it
 *     DDL_PLUGINS                    plugins that must load: names or absolute paths, separated by commas
 *     DDL_PLUGIN_PATH                folders to find plugins in, separated by colons
 *     DDL_SELF_TEST         1        0: transports of plugins are used without having been tried out
 *     DDL_ALGO             auto      algorithms, as ring or all_reduce=ring,broadcast=tree
 *     DDL_TUNE_CACHE                 a file that keeps the measured latency and bandwidth for later runs
 *     DDL_TRACE                      a file for the timeline of the job, for Perfetto or chrome://tracing
 *     DDL_TRACE_EVENTS     65536     so many events of each rank are kept, the newest
 *     DDL_TRACE_SUMMARY    0         1: with DDL_TRACE, rank 0 says at the end what communication cost
 *     DDL_TRACE_STEPS      0         1: with DDL_TRACE, also the steps of algorithms; many, and small operations are slower
 *     DDL_TIMEOUT_MS       300000    deadline of an operation; -1: none
 *     DDL_INIT_TIMEOUT_MS  60000     deadline of ddl_init
 *     DDL_STALL_MS         10000     a wait this long is reported; -1: never
 *     DDL_SLOW             20        a collective that takes so many times its estimate is reported; 0: never
 *     DDL_SLOW_RUNS        1         only when the same call was slow so often in a row
 *     DDL_PROGRESS_THREAD  0         1: operations progress on a thread of their own
 *     DDL_DETERMINISTIC    0         1: reduce in rank order whatever the algorithm and transport
 *     DDL_SPREAD           1         0: ranks that wait on one core stay there while another core is free
 *     DDL_HOST_ID                    ranks with equal text count as on one host; for tests
 *     DDL_RESTARTED        0         more than 0: ddl_init joins a running job, as ddl_join does
 *     DDL_MAC              0         1: frames carry a keyed checksum, where others can change packets
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
 * that of ((x0 + x1) + x2) + ... on any transport. f16, bf16, e4m3 and e5m2 are computed in f32 and rounded once
 * per step.
 * Integers wrap around.
 *
 * Security. In: with a job secret both ends of every connection prove it (HMAC-SHA256, fresh nonces, server first)
 * before anything else is parsed; without one, only processes of the same user on the same host are let in. What
 * strangers can make a rank hold is bounded in number, bytes and time. No size from the wire is believed before it is
 * checked. The secret is in no log, error or child's environment of ours. Out: data is not encrypted, so whoever can
 * read or change packets on the wire can read or change it; a member that holds the secret is trusted; a plugin is
 * trusted code; root is trusted. Use a private network or a tunnel across untrusted ones. */

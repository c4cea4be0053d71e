/* plugin: the ABI between ddl and its transports and devices; what plugin authors read. docs/plugins.md is the guide.
 * Append-only: a table grows at its end, its first member is its size, and an optional member is read only through
 * DDL_HAS. This room knows nothing of how the core uses a table beyond what is said here. */
#ifndef DDL_PLUGIN_H
#define DDL_PLUGIN_H

#include "api.h"

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
#define DDL_MESSAGE_DATA_BYTES (16u << 20)
#define DDL_MESSAGE_URGENT 1u /* it is small and lets the peer send: it may overtake messages that are not urgent */
typedef struct ddl_message {
    uint8_t header[DDL_MESSAGE_HEADER_BYTES]; /* opaque to the transport, delivered as it is */
    const void *payload;
    uint64_t payload_bytes; /* <= the transport's max_payload_bytes */
    struct ddl_message *next;
    uint64_t priv[4];
    uint64_t flags; /* DDL_MESSAGE_URGENT: a transport need not look at it */
} ddl_message;

/* Memory that was allocated as one; its number is never given again, not 0: of ordinary memory, or of that device. */
typedef struct ddl_allocation {
    void *base;
    uint64_t bytes, id;
} ddl_allocation;

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
     * when its host does not answer, ENOTCONN when there never was a connection, ECANCELED when memory was wanted back
     * (recall, redirect) and only the end of the link kept the peer away from it, EBADMSG after damaged bytes,
     * ENOMEM when there is no memory for what it sent. The core decides who is dead. */
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

    /* Bytes of memory that the control groups of this process (a container's limit) still allow; UINT64_MAX: no limit.
     * Who takes more is killed, and not refused. Reads files. */
    uint64_t (*memory_left)(const struct ddl_host *host);
    /* The allocation that [memory, memory + bytes) lies in, for who keeps registrations: as long as its number is the
     * same, so is the memory behind the address. device NULL: ordinary memory of the library's own, whose end is told
     * (memory_forget); else of that device plugin's device `index`, from 0. DDL_ERR_UNSUPPORTED: nobody knows when
     * that memory ends; keep nothing of it. */
    ddl_status (*allocation)(const struct ddl_host *host, const char *device, int32_t index, const void *memory,
                             uint64_t bytes, ddl_allocation *out);
} ddl_host;

/* >>transport */
enum {
    DDL_TRANSPORT_LOCAL = 1u << 0,  /* reaches ranks of the same host only */
    DDL_TRANSPORT_ORDERED = 1u << 1,   /* messages to one peer arrive in order; needed today */
    DDL_TRANSPORT_ON_REQUEST = 1u << 2, /* used only when DDL_TRANSPORTS names it: for tests and simulations */
    DDL_TRANSPORT_CHEAP_PROGRESS = 1u << 3, /* progress makes no system call: the core looks here first and often */
    /* Its native collectives, memory_register and get are for memory of its own device; it carries no messages. */
    DDL_TRANSPORT_DEVICE = 1u << 5,
    DDL_TRANSPORT_CAPTURE = 1u << 6, /* it takes ddl_native_call.capture */
    DDL_TRANSPORT_EVENT = 1u << 7,   /* and ddl_native_call.event: the events are of the device in the same plugin */
    DDL_TRANSPORT_BLIND = 1u << 4, /* does not notice that another host is gone: the core watches it over TCP as well */
    /* Its receivers read large payloads from the sender: the next message of a transfer is sent while one is read, and
     * one of up to 1 MiB without asking before; collectives of two ranks are cut into 512 KiB instead of 256. */
    DDL_TRANSPORT_PULLS = 1u << 8,
    /* What arrives is what the peer wrote: memory of this host alone. Headers then need no checksum and may come
     * without (unless DDL_CHECK=payload or DDL_MAC asks for it); damage by the peer itself is still looked for. */
    DDL_TRANSPORT_INTACT = 1u << 9
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
    const char *device; /* a device plugin that is loaded (cuda before others); NULL: there are no devices */
    uint64_t core_set;  /* which cores: ranks of a host that tell each other the same number share theirs */
    int32_t local_rank; /* this rank among those of its host; -1: not known here */
} ddl_transport_params;

/* Memory that was registered for get and put: key is opaque, made by one rank, used by its peers. */
typedef struct ddl_memory_key {
    uint64_t base; /* what the owner's address is called in offsets: its address, or 0 */
    uint8_t bytes[56];
} ddl_memory_key;

/* A collective that a transport runs by itself, by load and store, for a set of ranks (native_open). Buffers are
 * packed; which are looked at and how they may coincide is as in api.h, `bytes` being those of the smaller tensor, of
 * all_to_all those of one part. */
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
    /* Of a set whose memory is a device's (DDL_TRANSPORT_DEVICE), where reduce is NULL: the kernel is the plugin's. */
    int32_t dtype, op; /* ddl_dtype; ddl_op, never a program's own */
    int32_t device; /* where in and out are, as owner says: the plugin's own device + 1 */
    void *stream;   /* in is ready, and out may be written, when this stream comes here; NULL: at once. native_test says
                       when out is; what is put on the stream after native_start waits for that at the core's gate */
    double factor;  /* DDL_AVG: what the sum is multiplied by (integers are divided); else each input, before the sum */
    /* 1: stream is being captured into a graph, and so is the operation, which ends when all ranks have captured it:
     * each replay, by all, runs it without the host. What it uses stays until native_close. */
    int32_t capture;
    /* NULL, or an event of the device's (event_record) that stands on `stream` for this operation: in is ready when it
     * has happened. It is the transport's after DDL_OK. Only for transports with DDL_TRANSPORT_EVENT. */
    void *event;
    int32_t at_once; /* 1: *out_op may be NULL after DDL_OK: it has ended, and native_test is not called */
} ddl_native_call;

typedef struct ddl_transport {
    uint32_t size;
    uint32_t flags;
    /* Of one message; at least DDL_MESSAGE_PAYLOAD_BYTES. With DDL_TRANSPORT_PULLS more is used, up to
     * DDL_MESSAGE_DATA_BYTES, for data that the peer has asked for, where messages take less than a millisecond. */
    uint64_t max_payload_bytes;

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
     * borrowed until sent(). Anything else: not sent. Never blocks. Messages to one peer leave in order,
     * but for urgent ones. */
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
     * used. Registered memory. put completes (transferred) when the peer's memory holds the data. On return of
     * memory_release nobody reads or writes it: what this rank has begun with it ends (DDL_ERR_CANCELLED) before. */
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
    /* Looks at an operation up to `looks` times, without giving the core away; fewer, where ranks share cores and one
     * that has not come needs this one. DDL_OK when it has ended and is gone, DDL_IN_PROGRESS while it waits for rank
     * *out_rank of the set (of several for one that needs this core; -1: none is missing, or not known), or
     * DDL_ERR_MISMATCH when that rank has begun it with another signature; then nothing was written to out, and it
     * waits for a cancel, as it does after any other error: it has failed here. */
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
    /* A new process takes the rank of a peer for which peer_dead was called: everything about that peer begins anew.
     * add_peer follows, with the newcomer's address. Without it newcomers are reached another way, as by TCP; that the
     * newcomer's side decides alike follows from both having the same plugin. */
    void (*peer_again)(void *self, int32_t peer);
    /* The same for a transport without peer_again that runs native collectives: the peer, or this process itself, has
     * taken the rank of another; messages between the two go another way. DDL_OK: native_open may be given sets with
     * it. What a process has to set up as a newcomer it does in native_open: before, it may not have been admitted. The
     * address is what the peer's address() says when the group grows. All ranks of a set must open it, or none will. */
    ddl_status (*peer_native)(void *self, int32_t peer, const void *address, size_t bytes, const char *peer_host_id);
    /* memory_register for memory of a device of another plugin: `index`, from 0, of those of the device plugin of that
     * name. For transports that carry messages and read such memory by themselves, as adapters do; memory_release and
     * get go with it. DDL_ERR_UNSUPPORTED, or any error: that message goes through the host. Of 0 bytes nothing is
     * registered: DDL_OK says that there is such a way. */
    ddl_status (*memory_register_on)(void *self, const char *device, int32_t index, void *memory, size_t bytes,
                                     void **out_handle, ddl_memory_key *out_key);
    /* For transports that keep registrations (host->allocation): this memory is freed after the call, or a peer that
     * has its key may not read it any more. What is kept of it is closed on return; what a message uses, when that
     * ends. */
    void (*memory_forget)(void *self, void *memory, size_t bytes);
    /* For transports whose messages lie in memory: the next message of a peer where it lies, whole, looked for up to
     * `looks` times. DDL_OK: it stays there until taken steps behind it, and is delivered by progress if it is not
     * taken; the peer may still change it: copy, then check. DDL_IN_PROGRESS: none. Anything else: one for progress. */
    ddl_status (*peek)(void *self, int32_t peer, int32_t looks, const uint8_t **out_header, const void **out_payload,
                       uint64_t *out_bytes);
    void (*taken)(void *self, int32_t peer);
    /* The other side of peek, for transports with DDL_TRANSPORT_INTACT: room for a small message where the peer will
     * find it, behind all that was sent to it. DDL_OK: header and payload are written there, and the transport is asked
     * for nothing until publish, which sends it. Anything else: nothing was done, the message goes by send. */
    ddl_status (*reserve)(void *self, int32_t peer, uint64_t payload_bytes, uint8_t **out_header, void **out_payload);
    void (*publish)(void *self, int32_t peer, uint64_t payload_bytes);
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

    /* Optional from here. Ordinary memory that copies to and from the device reach at full speed (pinned). */
    ddl_status (*host_alloc)(void *self, size_t bytes, void **out_memory);
    void (*host_free)(void *self, void *memory);
    ddl_status (*stream_make)(void *self, void **out_stream);
    void (*stream_free)(void *self, void *stream);
    /* What is put on stream after this call waits, on the device, until event has happened. */
    ddl_status (*stream_wait)(void *self, void *stream, void *event);
    /* What is put on stream after this call waits, on the device, until gate_open, which takes the gate away: so an
     * operation that the host carries is ordered on a stream. */
    ddl_status (*gate_put)(void *self, void *stream, void **out_gate);
    void (*gate_open)(void *self, void *gate);
    /* 1 while stream is being captured into a graph, where nothing may wait for the host. */
    int32_t (*capturing)(void *self, void *stream);
    /* One of the kernels of the training layer, by its number below; params is the struct that stands beside it. */
    ddl_status (*kernel)(void *self, int32_t which, const void *params, void *stream);
    /* The allocation around a pointer: see host->allocation. DDL_ERR_UNSUPPORTED: it has no number that is never given
     * again, so adapters register it anew for each message. */
    ddl_status (*allocation)(void *self, const void *pointer, ddl_allocation *out);
} ddl_device;

/* What kernel is asked for. All pointers but `config` are the device's, all results have the bits of the host's.
 * Arrays overlap nowhere unless it is said; floats are aligned to 4 bytes. */
typedef enum ddl_kernel {
    DDL_KERNEL_SCALE = 1,  /* ddl_kernel_scale; 2 and 3 were STEP and SQUARES of f32 alone */
    DDL_KERNEL_ENCODE = 4, /* ddl_kernel_code: code = g + e, e = what the code misses */
    DDL_KERNEL_DECODE_ADD, /* ddl_kernel_code: sum += code */
    DDL_KERNEL_CONVERT,    /* ddl_kernel_convert */
    DDL_KERNEL_SIGNS,      /* ddl_kernel_convert, of f32 in dst alone: 1 and -1, what is not finite as it is */
    DDL_KERNEL_MERGE,      /* ddl_kernel_merge: of two codes of gTop-k */
    DDL_KERNEL_POWER,      /* ddl_kernel_power: of PowerSGD */
    DDL_KERNEL_STEP,       /* ddl_kernel_step: of an optimizer */
    DDL_KERNEL_SQUARES     /* ddl_kernel_squares */
} ddl_kernel;

/* dst = src * factor (1: none), divided by divisor (1: none), as an average is; dst may be src. */
typedef struct ddl_kernel_scale {
    void *dst;
    const void *src;
    int64_t count;
    int32_t dtype, divisor;
    double factor;
} ddl_kernel_scale;

/* dst = src in another type, or with add dst += that: f16, bf16 and f32 in any pair, f64 from f64. dst may be src if
 * they have one type. odd[0] += results that are not finite; or NULL. */
typedef struct ddl_kernel_convert {
    void *dst;
    const void *src;
    int64_t count;
    int32_t to, from; /* ddl_dtype */
    int32_t add, reserved;
    uint64_t *odd;
} ddl_kernel_convert;

/* One step of an optimizer of that ddl_optimizer_kind on arrays of f32 or f64: weight, gradient, moments (of kinds
 * that have them). Each number is rounded once to that type; rate holds the trust ratio of LARS and LAMB. */
typedef struct ddl_kernel_step {
    int32_t kind;
    int32_t moments; /* 1, of LAMB: the moments, and the update into r instead of the weight */
    double rate, decay, keep, beta1, fresh1, beta2, fresh2, unbias1, unbias2, epsilon;
    int64_t count;
    void *w;
    const void *g;
    void *m, *v, *r;
    int32_t dtype, reserved; /* ddl_dtype */
} ddl_kernel_step;

/* out[0] = the sum of x[i]^2, added in the order of the host, so that devices and hosts get the same bits: of each
 * block of 4096 elements sixteen sums, of those at i, i + 16, ..., then these in their order; the sums of 16 blocks in
 * theirs; then those of all such stretches. partial has room for a double per 4096 elements begun. */
typedef struct ddl_kernel_squares {
    const void *x;
    int64_t count;
    double *partial, *out;
    int32_t dtype, reserved; /* DDL_F32 or DDL_F64 */
} ddl_kernel_squares;

/* Codes of the training layer. config: with its defaults filled in, and none of PowerSGD; stream: of random numbers.
 * scratch: DDL_KERNEL_SCRATCH_BYTES(count) for encoders of top-k. odd[0] += values that were not finite; or NULL. */
#define DDL_KERNEL_SCRATCH_BYTES(count) (16384 + ((count) + 4095) / 4096 * 16)
typedef struct ddl_kernel_code {
    const ddl_compression *config;
    uint64_t stream;
    const float *g;
    float *e, *sum; /* e: the residual, or NULL, which encoders of sparse codes may refuse */
    int64_t count;
    void *code, *scratch;
    uint64_t *odd;
} ddl_kernel_code;

/* Two sparse arrays of k places in ascending order and k floats: own = the k largest magnitudes of their sum, of equal
 * ones the first; rest[place] += the others that are finite. both: room for 4 k numbers; scratch:
 * DDL_KERNEL_SCRATCH_BYTES(2 k). wrong[0] += places of theirs that do not ascend within count: then own and
 * rest mean nothing; nothing outside of the arrays is written to. */
typedef struct ddl_kernel_merge {
    int32_t *own;
    const int32_t *theirs;
    void *both;
    float *rest; /* count elements */
    int64_t count, k;
    void *scratch;
    uint64_t *wrong;
} ddl_kernel_merge;

/* Parts of PowerSGD on one rank: m is rows x cols, p and q are `rank` columns of rows and of cols elements. */
enum {
    DDL_POWER_BEGIN = 1,   /* q = the first one, drawn from stream */
    DDL_POWER_LEFT = 2,    /* m = g + m; p = m q */
    DDL_POWER_RIGHT = 3,   /* p = orthonormal columns, with the bits of the host; q = m' p */
    DDL_POWER_REBUILD = 4  /* out = p q', with the bits of the host; m = m - out */
};
typedef struct ddl_kernel_power {
    int32_t part, rank;
    int64_t rows, cols;
    const float *g;
    float *m, *p, *q, *out;
    uint64_t stream;
} ddl_kernel_power;

/* >>plugin */
typedef struct ddl_plugin {
    uint32_t size;
    uint32_t abi;        /* DDL_PLUGIN_ABI it was built with; refused when it is not the program's */
    const char *name;    /* as in libddl-NAME.so */
    const char *version; /* free text */
    const char *about;   /* one sentence */
    const ddl_transport *transport; /* or NULL */
    const ddl_device *device;       /* or NULL */
    /* Optional: the settings it reads, named as for host->setting, NULL at the end. Of other variables whose names
     * begin with the plugin's own, users are told. */
    const char *const *settings;
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

#endif /* DDL_PLUGIN_H */

/* mesh, second part: what transports call. Messages leave and arrive here; frames are checked once and handed to the
 * room that registered for their type. */
#ifndef DDL_MESH_HOST_H
#define DDL_MESH_HOST_H

#include "lasting.h"
#include "pace.h"

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

static inline bool ddl__is_intact(const ddl__endpoint *e) { return (e->table->flags & DDL_TRANSPORT_INTACT) != 0; }

/* Of the transport that calls: before links are chosen it is not yet that of the link. */
static const ddl__endpoint *ddl__endpoint_of(const ddl_host *host) {
    return (const ddl__endpoint *)(const void *)((const char *)host - offsetof(ddl__endpoint, host));
}

/* take: the frame is in hand and the next one is to follow it; else it was only looked at. */
static ddl_status ddl__host_frame(const ddl_host *host, int32_t peer, const uint8_t *header, bool take,
                                  ddl__frame *out) {
    ddl_context *c = ddl__core(host);
    ddl__mac *mac = c->settings.mac ? &c->links[peer].mac_in : NULL;
    uint64_t counter = 0;
    ddl_status status = mac != NULL ? ddl__mac_read(mac, header, out, &counter)
                                    : ddl__frame_read_by(header, ddl__is_intact(ddl__endpoint_of(host)), out);
    if (status == DDL_OK && (out->source != (uint32_t)peer || c->handlers[out->type].deliver == NULL ||
                             out->bytes > ddl__endpoint_of(host)->table->max_payload_bytes)) {
        status = DDL_ERR_CORRUPT;
    }
    if (status < 0) {
        ddl__log(&c->base, DDL_LOG_WARN, "damaged%s bytes arrived from rank %d (%s); its link is closed",
                 mac != NULL ? " or forged" : "", peer, ddl_status_text(status));
        return DDL_ERR_CORRUPT;
    }
    if (mac != NULL && take) {
        mac->next = counter + 1;
    }
    return DDL_OK;
}

static ddl_status ddl__host_measure(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes) {
    ddl__frame f;
    DDL__TRY(ddl__host_frame(host, peer, header, false, &f));
    *out_bytes = f.bytes;
    return DDL_OK;
}

/* A link is used for the first time. Where its transport is blind, the other host is watched from now on. */
static void ddl__link_used(ddl_context *c, int32_t peer) {
    ddl__link *l = &c->links[peer];
    if (!l->connected) {
        l->connected = true;
        ddl__page_link_tell(c, peer);
    }
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

static bool ddl__payload_ok(const ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    if (!c->settings.mac || (f->flags & DDL__FRAME_FLAG_CRC) == 0) {
        return ddl__frame_payload_ok(f, payload);
    }
    return ddl__mac_payload(&c->links[peer].mac_in, payload, f->bytes) == f->payload_crc;
}

static ddl_status ddl__arrived(ddl_context *c, int32_t peer, const ddl__frame *f, const void *payload) {
    if (!ddl__payload_ok(c, peer, f, payload)) {
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
    DDL__TRY(ddl__host_frame(host, peer, header, true, &f));
    return f.bytes == payload_bytes ? ddl__arrived(c, peer, &f, payload) : DDL_ERR_CORRUPT;
}

static ddl_status ddl__host_land(const ddl_host *host, int32_t peer, const uint8_t *header, uint64_t *out_bytes,
                                 void **out_landing, void **out_token) {
    ddl_context *c = ddl__core(host);
    ddl__landing *l = ddl__landing_get(c);
    if (l == NULL) {
        return DDL_ERR_NOMEM;
    }
    ddl_status status = ddl__host_frame(host, peer, header, true, &l->frame);
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
    l->begin_ns = l->frame.bytes >= DDL__PACE_BYTES ? ddl__now_ns() : 0;
    *out_bytes = l->frame.bytes;
    *out_landing = l->target != NULL ? l->target : l->scratch;
    *out_token = l;
    return DDL_OK;
}

static void ddl__host_landed(const ddl_host *host, int32_t peer, void *token, ddl_status status) {
    ddl_context *c = ddl__core(host);
    ddl__landing *l = token;
    if (status == DDL_OK && l->begin_ns != 0) {
        ddl__pace_add(c, peer, l->frame.bytes, ddl__now_ns() - l->begin_ns);
    }
    if (l->target != NULL) {
        if (status == DDL_OK) {
            ddl__count_received(c, peer, l->frame.bytes);
        }
        c->handlers[l->frame.type].placed(c, peer, l, status);
    } else if (status == DDL_OK && (status = ddl__arrived(c, peer, &l->frame, l->scratch)) < 0) {
        ddl__missed(c, peer, status == DDL_ERR_NOMEM ? ddl__how_no_memory : ddl__how_damaged);
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
    n->out.message.flags = message->flags;
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

/* Without a checksum of the header? */
static inline bool ddl__goes_bare(const ddl_context *c, const ddl__endpoint *e) {
    return ddl__is_intact(e) && !c->settings.check_payload && !c->settings.mac;
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
        f->payload_crc = c->settings.mac ? ddl__mac_payload(&l->mac_out, payload, f->bytes)
                                         : ddl__crc32c(0, payload, f->bytes);
    }
    if (ddl__goes_bare(c, l->endpoint)) {
        ddl__frame_write_bare(out->message.header, f);
    } else {
        ddl__frame_write(out->message.header, f);
    }
    if (c->settings.mac) {
        ddl__mac_seal(&l->mac_out, out->message.header);
    }
    out->message.payload = payload;
    out->message.payload_bytes = f->bytes;
    /* A CTS behind megabytes of data would make both sides send in turns. Its cookies order it; a MAC counts frames. */
    out->message.flags = f->type == DDL__FRAME_CTS && !c->settings.mac ? DDL_MESSAGE_URGENT : 0;
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

/* A rank that was only cut off must not come back beside the process that has its place: who says that it is another
 * incarnation than the one that this rank knows is refused. A client hears it in the verdict: its claim was in its
 * HELLO, its proof comes later. */
static ddl_status ddl__prove_step(ddl_context *c, ddl__auth *a, const uint8_t *in, size_t in_bytes, size_t *out_used,
                                  uint8_t *out, size_t *out_bytes) {
    if (a->role == DDL__AUTH_SERVER && a->peer_world != 0 && a->peer_rank < (uint32_t)c->world_size &&
        a->peer_incarnation != c->links[a->peer_rank].incarnation) {
        ddl__auth_refuse(a, DDL__AUTH_INCARNATION);
    }
    ddl_status status = ddl__auth_step(a, in, in_bytes, out_used, out, 256, out_bytes);
    if (status != DDL_OK) {
        return status;
    }
    return a->peer_incarnation == c->links[a->peer_rank].incarnation ? DDL_OK : DDL_ERR_AUTH;
}

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
                              .world = (uint32_t)c->world_size,
                              .incarnation = c->incarnation};
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
        status = ddl__prove_step(c, a, in, in_bytes, out_used, out, out_bytes);
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
    if (l->slower != NULL && host == &l->slower->host) {
        return; /* nothing is said there */
    }
    if (l->watch != NULL && l->watch != l->endpoint && host == &l->watch->host && system_error == ENOTCONN) {
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
    case ECANCELED:
        ddl__missed(c, peer, ddl__how_closed);
        break;
    case ENOTCONN:
        ddl__missed(c, peer, ddl__how_unreached);
        break;
    case EBADMSG:
        ddl__missed(c, peer, ddl__how_damaged);
        break;
    case ENOMEM:
        ddl__missed(c, peer, ddl__how_no_memory);
        break;
    default:
        ddl__missed(c, peer, ddl__how_ended);
    }
}

static void ddl__host_transferred(const ddl_host *host, void *cookie, ddl_status status) {
    ddl__host_sent(host, cookie, status);
}

static uint64_t ddl__host_memory_left(const ddl_host *host) {
    (void)host;
    return ddl__memory_left();
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
        .memory_left = ddl__host_memory_left,
        .allocation = ddl__host_allocation,
    };
}

#endif /* DDL_MESH_HOST_H */

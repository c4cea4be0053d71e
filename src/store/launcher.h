/* launcher: where rank 0 is, when only the key-value space of a launcher can tell. Rank 0 puts a word there: its
 * address, a port, and a fresh secret where the job has none; all fence, and the others get it. Then they meet over
 * TCP. The secret is as safe as that space, by which `mpirun -x DDL_SECRET` would send it too. */
#ifndef DDL_STORE_LAUNCHER_H
#define DDL_STORE_LAUNCHER_H

#include "pmi.h"
#include "pmix.h"

#define DDL__WORD_BYTES 512

typedef struct ddl__word {
    char host[256];
    int32_t port;
    uint8_t secret[32];
    bool has_secret;
} ddl__word;

/* "ddl1/10.0.0.5/29500/00ff..." or "ddl1/10.0.0.5/29500/-". */
static void ddl__word_write(const ddl__word *w, char *out, size_t cap) {
    ddl__text text = {out, cap, 0};
    ddl__text_add(&text, "ddl1/%s/%d/%s", w->host, (int)w->port, w->has_secret ? "" : "-");
    for (size_t i = 0; w->has_secret && i < sizeof w->secret; i++) {
        ddl__text_add(&text, "%02x", w->secret[i]);
    }
}

static int ddl__hex_digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* False: it is no word of rank 0. */
static bool ddl__word_read(const char *text, ddl__word *out) {
    char port[8] = "";
    int used = 0;
    int64_t number = 0;
    memset(out, 0, sizeof *out);
    if (sscanf(text, "ddl1/%255[^/]/%7[0-9]/%n", out->host, port, &used) != 2 || used == 0 ||
        !ddl__parse_int(port, 1, 65535, &number)) {
        return false;
    }
    for (const char *at = out->host; *at != 0; at++) {
        if ((unsigned char)*at <= ' ' || *at == 127) { /* no name, and it goes into sentences */
            return false;
        }
    }
    const char *hex = text + used;
    out->port = (int32_t)number;
    out->has_secret = strcmp(hex, "-") != 0;
    if (out->has_secret && strlen(hex) != 2 * sizeof out->secret) {
        return false;
    }
    for (size_t i = 0; out->has_secret && i < sizeof out->secret; i++) {
        int high = ddl__hex_digit(hex[2 * i]), low = ddl__hex_digit(hex[2 * i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        out->secret[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* The address of rank 0 for the others: of the interface that was named, else of the first that is up; the loopback
 * only where there is no other. */
static ddl_status ddl__word_address(const ddl__settings *s, ddl__address *out, ddl__sentence *why) {
    ddl__addresses found = {0};
    ddl__interface_addresses(s->interface_name, &found);
    if (found.count == 0 && s->interface_name == NULL) {
        ddl__interface_addresses("lo", &found);
    }
    if (found.count == 0) {
        return ddl__fail(
            why, DDL_ERR_CONFIG,
            "ddl_init: rank 0 has no address to tell the others: interface %s has none; check DDL_INTERFACE and "
            "`ip addr`",
            s->interface_name != NULL ? s->interface_name : "lo");
    }
    *out = found.list[0];
    return DDL_OK;
}

/* A port that is free now; of DDL_PORT_RANGE its first, as the ports after it are tried too. */
static int32_t ddl__word_port(const ddl__settings *s, ddl__address address) {
    socklen_t bytes = sizeof address.at;
    int32_t port = 0;
    if (s->port_first != 0) {
        return s->port_first;
    }
    ddl__address_set_port(&address, 0);
    int fd = socket(address.at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, &address.at.any, address.bytes) == 0 && getsockname(fd, &address.at.any, &bytes) == 0) {
        port = ntohs(address.at.any.sa_family == AF_INET6 ? address.at.v6.sin6_port : address.at.v4.sin_port);
    }
    if (fd >= 0) {
        close(fd);
    }
    return port != 0 ? DDL__MIN(port, 65536 - DDL__MEET_PORTS) : 29500;
}

static ddl_status ddl__word_make(const ddl__settings *s, ddl__word *out, ddl__sentence *why) {
    ddl__address address;
    memset(out, 0, sizeof *out);
    DDL__TRY(ddl__word_address(s, &address, why));
    const void *at = address.at.any.sa_family == AF_INET6 ? (const void *)&address.at.v6.sin6_addr
                                                          : (const void *)&address.at.v4.sin_addr;
    inet_ntop(address.at.any.sa_family, at, out->host, sizeof out->host);
    out->port = ddl__word_port(s, address);
    out->has_secret = s->secret == NULL;
    return out->has_secret && ddl__random(out->secret, sizeof out->secret) != DDL_OK
               ? ddl__fail(why, DDL_ERR_SYSTEM, "ddl_init: the kernel gives no random bytes for a job secret")
               : DDL_OK;
}

/* What the word says goes into the settings, as if MASTER_ADDR, MASTER_PORT and DDL_SECRET had. */
static ddl_status ddl__word_take(ddl__settings *s, ddl__base *base, const ddl__word *w, ddl__sentence *why) {
    ddl__secret secret = {NULL, 0, NULL};
    s->place.host = ddl__copy_string(base, w->host);
    if (s->place.host == NULL) {
        return ddl__fail(why, DDL_ERR_NOMEM, "ddl_init: no memory for the name of rank 0's host");
    }
    s->place.kind = DDL__MEET_TCP;
    s->place.port = w->port;
    s->place.ports = DDL__MEET_PORTS;
    if (w->has_secret && s->secret == NULL) {
        DDL__TRY(ddl__secret_set(base, "the launcher", w->secret, sizeof w->secret, &secret, why));
        s->secret = secret.bytes;
        s->secret_bytes = secret.count;
        s->secret_source = secret.source;
    }
    return DDL_OK;
}

/* Turns a place that the launcher knows into an address. Blocks until all ranks have called, at most init_timeout_ms.
 * Does nothing for other places. Errors: DDL_ERR_CONFIG, DDL_ERR_SYSTEM, DDL_ERR_TIMEOUT, DDL_ERR_NOMEM. */
static ddl_status ddl__launcher_place(ddl__settings *s, ddl__base *base, ddl__sentence *why) {
    uint64_t deadline = ddl__deadline(ddl__now_ns(), s->init_timeout_ms);
    char text[DDL__WORD_BYTES] = "";
    ddl__word word;
    if (s->place.kind != DDL__MEET_PMI && s->place.kind != DDL__MEET_PMIX) {
        return DDL_OK;
    }
    if (s->launch.rank == 0) {
        DDL__TRY(ddl__word_make(s, &word, why));
        ddl__word_write(&word, text, sizeof text);
    }
    ddl_status status = s->place.kind == DDL__MEET_PMI ? ddl__pmi_share(s, text, sizeof text, deadline, why)
                                                       : ddl__pmix_share(s, text, sizeof text, deadline, why);
    if (status == DDL_OK && !ddl__word_read(text, &word)) {
        status =
            ddl__fail(why, DDL_ERR_CONFIG,
                      "ddl_init: rank 0 left no address in the key-value space of the launcher (%s): all ranks must "
                      "run one version of ddl, and none of them with MASTER_ADDR alone",
                      s->launch.by);
    }
    status = status == DDL_OK ? ddl__word_take(s, base, &word, why) : status;
    ddl__wipe(text, sizeof text);
    ddl__wipe(&word, sizeof word);
    return status;
}

/* Waits until the name of rank 0's host resolves: in a cluster that gives names to what it starts (Kubernetes), it does
 * so when rank 0 has been placed. Who uses the name says what is wrong with it. */
static void ddl__launcher_name_wait(const ddl__settings *s, const ddl__base *base) {
    uint64_t start = ddl__now_ns(), deadline = ddl__deadline(start, s->init_timeout_ms);
    ddl__addresses list;
    bool said = false;
    int error = 0;
    while (s->place.kind == DDL__MEET_TCP && s->launch.rank != 0 &&
           ((error = ddl__resolve(s->place.host, &list)) == EAI_NONAME || error == EAI_AGAIN) &&
           ddl__now_ns() < deadline) {
        if (!said && ddl__now_ns() - start > 5 * DDL__NS_PER_S) {
            ddl__log(base, DDL_LOG_WARN, "the name of rank 0's host, %s (%s), does not resolve yet: %s; trying on",
                     s->place.host, s->place.from, gai_strerror(error));
            said = true;
        }
        ddl__pause_ms(200);
    }
}

#endif /* DDL_STORE_LAUNCHER_H */

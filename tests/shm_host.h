/* shm_host.h: endpoints of plugins/shm on the small host; what the system refuses is asked for in `faults`. */
#ifndef TEST_SHM_HOST_H
#define TEST_SHM_HOST_H

#include "mini_host.h"

#include "shm_refuse.h"

/* What is passed: one for each pair and tag. */
static struct {
    int here[RANKS][RANKS][2], fd[RANKS][RANKS][2];
} post_office;

static ddl_status mini_send_fd(const ddl_host *host, int32_t peer, uint64_t tag, int fd) {
    int from = of(host)->rank, k = tag == SHM_TAG_OUT;
    if (of(host)->no_passing) {
        return DDL_ERR_UNSUPPORTED;
    }
    CHECK_EQ(post_office.here[from][peer][k], 0); /* each says each thing once */
    post_office.here[from][peer][k] = 1;
    post_office.fd[from][peer][k] = fd >= 0 ? dup(fd) : -1;
    return DDL_OK;
}

static ddl_status mini_take_fd(const ddl_host *host, int32_t peer, uint64_t tag, int *out_fd) {
    int to = of(host)->rank, k = tag == SHM_TAG_OUT;
    if (!post_office.here[peer][to][k]) {
        return of(host)->no_passing ? DDL_ERR_UNSUPPORTED : DDL_IN_PROGRESS;
    }
    post_office.here[peer][to][k] = 0;
    *out_fd = post_office.fd[peer][to][k];
    return DDL_OK;
}

static ddl_status mini_deliver(const ddl_host *host, int32_t peer, const uint8_t *header, const void *payload,
                               uint64_t bytes) {
    endpoint *e = of(host);
    if (e->refuse || word(header, 0) != bytes) {
        return DDL_ERR_CORRUPT;
    }
    CHECK_EQ(word(header, 2), peer);
    arrived(e, peer, payload, bytes, word(header, 1));
    if (e->echo) {
        answer(e, peer, bytes);
    }
    return DDL_OK;
}

static void endpoint_open(endpoint *e, int rank, int n, const char *first, const char *second) {
    endpoint_host(e, rank);
    e->settings[0] = first;
    e->settings[1] = second;
    e->host.deliver = mini_deliver;
    e->host.send_fd = mini_send_fd;
    e->host.take_fd = mini_take_fd;
    endpoint_start(e, n, ddl_plugin_shm_v1(&e->host));
}

static void world_meet(endpoint *e, int n) {
    uint8_t address[RANKS][256];
    size_t bytes[RANKS];
    memset(&post_office, 0, sizeof post_office);
    for (int i = 0; i < n; i++) {
        bytes[i] = sizeof address[i];
        CHECK_EQ(e[i].transport->address(e[i].self, address[i], &bytes[i]), DDL_OK);
    }
    for (int i = 0; i < n * n; i++) {
        uint64_t latency = 0, bandwidth = 0;
        if (i / n != i % n) {
            e[i / n].transport->add_peer(e[i / n].self, i % n, address[i % n], bytes[i % n], "here", &latency,
                                         &bandwidth);
        }
    }
}

/* Asks until all have answered; answers[i][k]: what i says of k. */
static void world_settle(endpoint *e, int n, ddl_status answers[RANKS][RANKS]) {
    int open = 1;
    for (int turn = 0; open > 0; turn++) {
        CHECK(turn < 10);
        if (turn >= 10) {
            return;
        }
        open = 0;
        for (int i = 0; i < n * n; i++) {
            if (i / n != i % n) {
                ddl_status s = answers[i / n][i % n] = e[i / n].transport->ready(e[i / n].self, i % n);
                open += s == DDL_IN_PROGRESS;
            }
        }
    }
    for (int i = 0; i < n * n; i++) { /* both sides of a pair say the same */
        if (i / n != i % n) {
            CHECK_EQ(answers[i / n][i % n] == DDL_OK, answers[i % n][i / n] == DDL_OK);
        }
    }
}

static void world_open_as(endpoint *e, int n, const char *first, const char *second) {
    ddl_status answers[RANKS][RANKS];
    memset(&faults, 0, sizeof faults);
    for (int i = 0; i < n; i++) {
        endpoint_open(&e[i], i, n, first, second);
    }
    world_meet(e, n);
    world_settle(e, n, answers);
    for (int i = 0; i < n * n; i++) {
        CHECK(i / n == i % n || answers[i / n][i % n] == DDL_OK);
    }
}

static void world_open(endpoint *e, int n) { world_open_as(e, n, NULL, NULL); }

#endif

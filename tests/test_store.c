/* The rendezvous: over TCP with a secret, over a unix socket without, and by the program's own exchange. Each rank gets
 * each blob, at 1 to 64 ranks; whoever comes late is waited for; whoever is missing, dead, twice there or of another job
 * is named, with one sentence on all ranks; and strangers on the port are a counter.
 * tests/run: variants=gcc,asan,tsan timeout=200 waits=yes quick=yes */
#include "rendezvous.h"

TEST(tcp_with_a_secret) {
    new_place();
    all_sizes(secret);
}

TEST(unix_socket_without_a_secret) {
    new_place();
    all_sizes(NULL);
}

TEST(late_rank_0_and_late_others) {
    for (int way = 0; way < 4; way++) {
        one ones[4];
        new_place();
        make_job(ones, 4, way < 2 ? secret : NULL);
        for (int r = 0; r < 4; r++) {
            ones[r].delay_ms = way % 2 == (r == 0) ? 700 : 0;
        }
        LEAKS_NOTHING(run_all(ones, 4));
        check_good(ones, 4);
        for (int r = 0; r < 4; r++) {
            CHECK(ones[r].took_s < 1.2 * test_slow());
        }
    }
}

TEST(ipv6_and_names) {
    one ones[2];
    int port = ranks_port();
    snprintf(rendezvous, sizeof rendezvous, "tcp://localhost:%d", port);
    make_job(ones, 2, secret);
    run_all(ones, 2);
    check_good(ones, 2);
    ddl__addresses v6;
    if (ddl__resolve("::1", &v6) != 0 || !ddl__addresses_have_mine(&v6)) {
        SKIP("this machine has no IPv6 loopback");
    }
    snprintf(rendezvous, sizeof rendezvous, "tcp://[::1]:%d", port);
    make_job(ones, 2, secret);
    run_all(ones, 2);
    check_good(ones, 2);
}

TEST(missing_ranks_are_named_on_all) {
    new_place();
    missing(secret, -1);
    new_place();
    missing(NULL, -1);
}

TEST(first_deadline_ends_the_start_for_all) {
    new_place();
    missing(secret, 2);
    new_place();
    missing(secret, 0);
}

TEST(rank_0_never_comes) {
    new_place();
    for (int way = 0; way < 2; way++) {
        one o = rank_of(2, 1, way == 0 ? secret : NULL);
        o.config.init_timeout_ms = 300;
        LEAKS_NOTHING(run_all(&o, 1));
        CHECK_EQ(o.status, DDL_ERR_TIMEOUT);
        CHECK_STR(o.why.text, "rank 1 of 2 could not reach rank 0");
        CHECK_STR(o.why.text, "127.0.0.1");
        CHECK(o.took_s >= 0.25 && o.took_s < 1.5 * test_slow());
    }
}

TEST(unknown_host_is_named) {
    snprintf(rendezvous, sizeof rendezvous, "tcp://no-such-host.invalid:29500");
    one ones[2];
    make_job(ones, 2, secret);
    ones[1].config.init_timeout_ms = 300;
    run_all(ones, 2);
    CHECK_EQ(ones[0].status, DDL_ERR_CONFIG);
    CHECK_EQ(ones[1].status, DDL_ERR_TIMEOUT);
    for (int r = 0; r < 2; r++) {
        CHECK_STR(ones[r].why.text, "no-such-host.invalid");
    }
}

/* Rank 2 comes twice: one of the two hears it, the job goes on. */
TEST(duplicate_rank_is_told) {
    for (int way = 0; way < 2; way++) {
        one ones[5];
        new_place();
        warnings = 0;
        make_job(ones, 4, way == 0 ? secret : NULL);
        ones[4] = rank_of(4, 2, way == 0 ? secret : NULL);
        ones[3].delay_ms = 500; /* the second 2 finds the server still there */
        ones[4].delay_ms = 200;
        LEAKS_NOTHING(run_all(ones, 5));
        check_good(ones, 4);
        CHECK_EQ(ones[4].status, DDL_ERR_CONFIG);
        CHECK_STR(ones[4].why.text, "another process with the same rank");
        CHECK_EQ(warnings, 1);
    }
}

TEST(second_rank_0_is_told_who_has_the_port) {
    one ones[5];
    new_place();
    make_job(ones, 4, secret);
    ones[4] = rank_of(4, 0, secret);
    ones[4].delay_ms = 100;
    ones[3].delay_ms = (int)(1200 * test_slow());
    LEAKS_NOTHING(run_all(ones, 5));
    check_good(ones, 4);
    CHECK_EQ(ones[4].status, DDL_ERR_CONFIG);
    CHECK_STR(ones[4].why.text, "taken");
    CHECK_STR(ones[4].why.text, "by process ");
    CHECK_STR(ones[4].why.text, "test_store");
}

TEST(other_world_size_is_told) {
    one ones[3];
    new_place();
    make_job(ones, 2, secret);
    ones[1].delay_ms = 400;
    ones[2] = rank_of(3, 1, secret);
    LEAKS_NOTHING(run_all(ones, 3));
    check_good(ones, 2);
    CHECK_EQ(ones[2].status, DDL_ERR_CONFIG);
    CHECK_STR(ones[2].why.text, "a world of 2");
}

TEST(other_version_of_the_blob_is_told) {
    one ones[3];
    new_place();
    make_job(ones, 2, secret);
    ones[1].delay_ms = 400;
    ones[2] = rank_of(2, 1, secret);
    ones[2].bytes = 99;
    LEAKS_NOTHING(run_all(ones, 3));
    check_good(ones, 2);
    CHECK_EQ(ones[2].status, DDL_ERR_VERSION);
}

/* A rank with another secret, or none, is out; the job goes on; nothing tells the secret. */
TEST(wrong_secret_is_refused) {
    one ones[4];
    new_place();
    make_job(ones, 2, secret);
    ones[1].delay_ms = (int)(1300 * test_slow());
    ones[2] = rank_of(2, 1, "another secret, which is wrong");
    ones[3] = rank_of(2, 1, NULL);
    ones[3].config.init_timeout_ms = 400;
    LEAKS_NOTHING(run_all(ones, 4));
    check_good(ones, 2);
    CHECK(ones[0].strangers > 0);
    CHECK_EQ(ones[2].status, DDL_ERR_AUTH);
    CHECK_STR(ones[2].why.text, "does not hold this job's secret");
    CHECK(strstr(ones[2].why.text, "another secret") == NULL);
    CHECK_EQ(ones[3].status, DDL_ERR_TIMEOUT);
    CHECK_STR(ones[3].why.text, "this rank has no secret");
}

TEST(two_jobs_on_one_port) {
    one ones[4];
    new_place();
    make_job(ones, 2, secret);
    make_job(ones + 2, 2, secret);
    ones[0].config.job = ones[1].config.job = "first";
    ones[2].config.job = ones[3].config.job = "second";
    ones[2].mark = ones[3].mark = 5;
    ones[1].delay_ms = 500;
    ones[2].delay_ms = ones[3].delay_ms = 300;
    LEAKS_NOTHING(run_all(ones, 4)); /* the second waits its turn */
    check_good(ones, 4);
    ones[1].delay_ms = (int)(2000 * test_slow());
    LEAKS_NOTHING(run_all(ones, 4)); /* the first is too slow for that */
    check_good(ones, 2);
    CHECK_EQ(ones[2].status, DDL_ERR_CONFIG);
    CHECK_STR(ones[2].why.text, "taken");
    CHECK_EQ(ones[3].status, DDL_ERR_AUTH);
    CHECK_STR(ones[3].why.text, "another job");
}

TEST(two_jobs_of_one_user_without_secret) {
    one ones[4];
    new_place();
    make_job(ones, 2, NULL);
    make_job(ones + 2, 2, NULL);
    ones[0].config.job = ones[1].config.job = "first";
    ones[2].config.job = ones[3].config.job = "second";
    ones[2].mark = ones[3].mark = 5;
    ones[1].delay_ms = 300; /* the names differ: no need to wait */
    run_all(ones, 4);
    check_good(ones, 4);
    CHECK(ones[2].took_s < 0.25 * test_slow());
}

TEST(no_secret_between_hosts) {
    one ones[2];
    snprintf(rendezvous, sizeof rendezvous, "tcp://192.0.2.77:29500"); /* RFC 5737: nobody's */
    make_job(ones, 2, NULL);
    run_all(ones, 2);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(ones[r].status, DDL_ERR_AUTH);
        CHECK_STR(ones[r].why.text, "192.0.2.77");
        CHECK_STR(ones[r].why.text, "DDL_SECRET_FILE");
    }
    one zero = rank_of(2, 0, secret);
    run_all(&zero, 1);
    CHECK_EQ(zero.status, DDL_ERR_CONFIG);
    CHECK_STR(zero.why.text, "no address of this machine");
}

/* ---- strangers ---- */

static int dial(int port) {
    ddl__address a;
    ddl__addresses list;
    ddl__resolve("127.0.0.1", &list);
    a = list.list[0];
    ddl__address_set_port(&a, port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, &a.at.any, a.bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

typedef struct crowd {
    int port, kind, stop, made;
} crowd;

/* Keeps coming: silent, HTTP, garbage, a handshake that stops half-way, one byte at a time. */
static void *crowd_main(void *p) {
    crowd *c = p;
    int fds[100];
    memset(fds, -1, sizeof fds);
    uint32_t x = 12345;
    for (int i = 0; !__atomic_load_n(&c->stop, __ATOMIC_RELAXED); i = (i + 1) % 100) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
        fds[i] = dial(c->port);
        if (fds[i] < 0) {
            ddl__pause_ms(1);
            continue;
        }
        __atomic_add_fetch(&c->made, 1, __ATOMIC_RELAXED);
        uint8_t junk[300];
        for (size_t k = 0; k < sizeof junk; k++) {
            x = x * 1664525u + 1013904223u;
            junk[k] = (uint8_t)(x >> 24);
        }
        size_t n = sizeof junk;
        switch (c->kind) {
        case 0:
            n = 0;
            break;
        case 1:
            n = (size_t)snprintf((char *)junk, sizeof junk, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
            break;
        case 2:
            break;
        case 3:
            memcpy(junk, "ddlh\1\0\1\1", 8);
            break; /* a HELLO of this version, then noise */
        default:
            memcpy(junk, "ddlh\1\0\1\1", 8);
            n = 1;
            break;
        }
        (void)!send(fds[i], junk, n, MSG_NOSIGNAL);
    }
    for (int i = 0; i < 100; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    return NULL;
}

TEST(strangers_are_a_counter) {
    static one ones[16];
    for (int kind = 0; kind < 5; kind++) {
        crowd c = {.kind = kind, .port = ranks_port()};
        pthread_t thread;
        snprintf(rendezvous, sizeof rendezvous, "tcp://127.0.0.1:%d", c.port);
        make_job(ones, 16, secret);
        ones[15].delay_ms = 600; /* so long is the port open */
        CHECK_EQ(pthread_create(&thread, NULL, crowd_main, &c), 0);
        run_all(ones, 16);
        __atomic_store_n(&c.stop, 1, __ATOMIC_RELAXED);
        pthread_join(thread, NULL);
        check_good(ones, 16);
        CHECK(c.made > 64);
        CHECK(ones[0].strangers > 16);
    }
}

TEST(silent_strangers_do_not_lock_out_ranks) {
    static one ones[8];
    int port = ranks_port(), fds[200];
    snprintf(rendezvous, sizeof rendezvous, "tcp://127.0.0.1:%d", port);
    make_job(ones, 8, secret);
    for (int r = 1; r < 8; r++) {
        ones[r].delay_ms = 700;
    }
    pthread_t zero;
    CHECK_EQ(pthread_create(&zero, NULL, run_one, &ones[0]), 0);
    for (int i = 0; i < 200; i++) {
        while ((fds[i] = dial(port)) < 0) {
            ddl__pause_ms(1);
        }
    }
    run_all(ones + 1, 7);
    pthread_join(zero, NULL);
    check_good(ones, 8);
    CHECK_EQ(ones[0].strangers >= 100, 1); /* 64 at a time were let in */
    for (int r = 1; r < 8; r++) {
        CHECK(ones[r].took_s < 3 * test_slow());
    }
    for (int i = 0; i < 200; i++) {
        close(fds[i]);
    }
}

/* What is not ddl, or is silent, sits at rank 0's place. */
static void *answer_main(void *p) {
    crowd *c = p;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    ddl__addresses list;
    ddl__resolve("127.0.0.1", &list);
    ddl__address_set_port(&list.list[0], c->port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    CHECK_EQ(bind(fd, &list.list[0].at.any, list.list[0].bytes), 0);
    CHECK_EQ(listen(fd, 8), 0);
    __atomic_store_n(&c->made, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&c->stop, __ATOMIC_RELAXED)) {
        if (ddl__socket_wait(fd, POLLIN, ddl__now_ns() + 20 * DDL__NS_PER_MS)) {
            int peer = accept(fd, NULL, NULL);
            (void)!send(peer, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
            close(peer);
        }
    }
    close(fd);
    return NULL;
}

TEST(another_program_on_the_port_is_named) {
    crowd c = {.port = ranks_port()};
    one ones[2];
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, answer_main, &c), 0);
    while (!__atomic_load_n(&c.made, __ATOMIC_ACQUIRE)) {
        ddl__pause_ms(1);
    }
    snprintf(rendezvous, sizeof rendezvous, "tcp://127.0.0.1:%d", c.port);
    make_job(ones, 2, secret);
    run_all(ones, 2);
    CHECK_EQ(ones[0].status, DDL_ERR_CONFIG);
    CHECK_STR(ones[0].why.text, "taken");
    CHECK(ones[1].status == DDL_ERR_CONFIG);
    CHECK_STR(ones[1].why.text, "not ddl");
    make_job(ones, 2, secret); /* beside torchrun's agent the next port does */
    ones[0].ports = ones[1].ports = 8;
    run_all(ones, 2);
    check_good(ones, 2);
    __atomic_store_n(&c.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
}

/* ---- deaths ---- */

TEST(rank_that_dies_is_named_on_all) {
    for (int way = 0; way < 2; way++) {
        one ones[4];
        new_place();
        make_job(ones, 4, way == 0 ? secret : NULL);
        pid_t pid = spawn(&ones[2]);
        pthread_t a, b;
        CHECK_EQ(pthread_create(&a, NULL, run_one, &ones[0]), 0);
        CHECK_EQ(pthread_create(&b, NULL, run_one, &ones[1]), 0);
        ddl__pause_ms((uint64_t)(400 * test_slow())); /* rank 3 never comes */
        double killed = test_now_s();
        end(pid);
        pthread_join(a, NULL);
        pthread_join(b, NULL);
        CHECK(test_now_s() - killed < 1 * test_slow());
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(ones[r].status, DDL_ERR_PEER);
            CHECK_STR(ones[r].why.text, "rank 2 ");
            CHECK_STR(ones[r].why.text, "rank 3 of 4 had not come");
        }
    }
}

TEST(rank_0_that_dies_is_named_and_its_port_is_free) {
    one ones[3];
    new_place();
    make_job(ones, 3, secret);
    pid_t pid = spawn(&ones[0]);
    pthread_t a;
    CHECK_EQ(pthread_create(&a, NULL, run_one, &ones[1]), 0);
    ddl__pause_ms((uint64_t)(400 * test_slow()));
    end(pid);
    pthread_join(a, NULL);
    CHECK_EQ(ones[1].status, DDL_ERR_PEER);
    CHECK_STR(ones[1].why.text, "rank 0");
    make_job(ones, 3, secret);
    LEAKS_NOTHING(run_all(ones, 3));
    check_good(ones, 3);
    CHECK(ones[0].took_s < 1 * test_slow());
}

TEST(all_killed_at_many_moments) {
    new_place(); /* one port for all: restarts must not meet EADDRINUSE */
    for (int moment = 0; moment < 20; moment++) {
        one ones[4];
        pid_t pids[4];
        make_job(ones, 4, moment % 2 ? secret : NULL);
        for (int r = 0; r < 4; r++) {
            pids[r] = spawn(&ones[r]);
        }
        usleep((useconds_t)moment * 700);
        for (int r = 0; r < 4; r++) {
            end(pids[r]);
        }
        run_all(ones, 4);
        check_good(ones, 4);
    }
}

/* ---- users ---- */

TEST(unix_socket_of_another_user) {
    int ends[2];
    one o;
    if (geteuid() != 0) {
        SKIP("needs root, to be two users");
    }
    new_place();
    CHECK_EQ(pipe(ends), 0);
    o = rank_of(2, 1, NULL);
    ddl__address a;
    ddl__address_of_unix(&a, atoi(strrchr(rendezvous, ':') + 1), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) { /* takes the name of root's job */
        int fd = setuid(12345) == 0 ? ddl__listen_at(&a) : -1;
        (void)!write(ends[1], fd >= 0 ? "1" : "0", 1);
        pause();
        _exit(0);
    }
    char ready = 0;
    CHECK(read(ends[0], &ready, 1) == 1 && ready == '1');
    run_all(&o, 1);
    CHECK_EQ(o.status, DDL_ERR_AUTH);
    CHECK_STR(o.why.text, "another user");
    end(pid);
    close(ends[0]);
    close(ends[1]);
    /* and the other way: another user knocks */
    one ones[2];
    make_job(ones, 2, NULL);
    ones[1].delay_ms = (int)(1500 * test_slow());
    fflush(NULL);
    pid = fork();
    if (pid == 0) {
        int fd = setuid(12345) == 0 ? -1 : -2;
        for (int i = 0; i < 300 && fd == -1; i++) {
            fd = ddl__connect_at(&a, ddl__now_ns() + DDL__NS_PER_S);
            ddl__pause_ms(1);
        }
        char byte; /* closed on us, without a word, long before the job goes on */
        bool closed = fd >= 0 && ddl__socket_wait(fd, POLLIN, ddl__now_ns() + (uint64_t)(700e6 * test_slow()));
        _exit(closed && read(fd, &byte, 1) <= 0 ? 0 : 1);
    }
    run_all(ones, 2);
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_EQ(status, 0);
    check_good(ones, 2);
    CHECK_EQ(ones[0].strangers, 1);
}

/* ---- two hosts: network namespaces with a cable between them ---- */

typedef struct host_rank {
    one o;
    char space[64];
    int listens_here, listens_elsewhere;
} host_rank;

/* A thread has its own namespace. */
static void *host_main(void *p) {
    host_rank *h = p;
    int fd = open(h->space, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    return run_one(&h->o);
}

/* Looks at who listens in the namespace of rank 0 while it waits: at 10.77.0.1 alone. */
static void *host_look(void *p) {
    host_rank *h = p;
    char line[300];
    int fd = open(h->space, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    ddl__pause_ms((uint64_t)(300 * test_slow()));
    FILE *f = fopen("/proc/thread-self/net/tcp", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        unsigned address, port, state;
        if (sscanf(line, " %*d: %x:%x %*s %x", &address, &port, &state) == 3 && state == 10) {
            h->listens_here += address == htonl(0x0a4d0001);
            h->listens_elsewhere += address != htonl(0x0a4d0001);
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return NULL;
}

TEST(two_hosts) {
    host_rank h[2];
    pthread_t threads[3];
    char command[700];
    int id = (int)getpid();
    snprintf(command, sizeof command,
             "(ip netns add ddlA%d && ip netns add ddlB%d && ip -n ddlA%d link add va type veth peer name vb netns "
             "ddlB%d && "
             "ip -n ddlA%d addr add 10.77.0.1/24 dev va && ip -n ddlB%d addr add 10.77.0.2/24 dev vb && "
             "ip -n ddlA%d link set va up && ip -n ddlB%d link set vb up) 2>/dev/null",
             id, id, id, id, id, id, id, id);
    bool made = geteuid() == 0 && system(command) == 0;
    for (int way = 0; way < 3 && made; way++) { /* by address; by interface behind another name; without a secret */
        memset(h, 0, sizeof h);
        for (int r = 0; r < 2; r++) {
            snprintf(rendezvous, sizeof rendezvous, "tcp://10.77.0.1:29555");
            h[r].o = rank_of(2, r, way < 2 ? secret : NULL);
            snprintf(h[r].space, sizeof h[r].space, "/run/netns/ddl%c%d", 'A' + r, id);
        }
        if (way == 1) {
            h[0].o.config.rendezvous = "tcp://10.99.99.99:29555";
            h[0].o.config.interface_name = "va";
        }
        h[0].o.config.init_timeout_ms = way == 2 ? 300 : 20000;
        h[1].o.delay_ms = (int)(way == 2 ? 0 : 600 * test_slow());
        pthread_create(&threads[0], NULL, host_main, &h[0]);
        pthread_create(&threads[1], NULL, host_main, &h[1]);
        pthread_create(&threads[2], NULL, host_look, &h[0]);
        for (int i = 0; i < 3; i++) {
            pthread_join(threads[i], NULL);
        }
        if (way < 2) {
            CHECK(h[0].o.table_right && h[1].o.table_right);
            CHECK_EQ(h[0].listens_here, 1);
        } else {
            CHECK_EQ(h[1].o.status, DDL_ERR_AUTH);
            CHECK_STR(h[1].o.why.text, "is another machine");
        }
        CHECK_EQ(h[0].listens_elsewhere, 0);
    }
    snprintf(command, sizeof command, "ip netns del ddlA%d 2>/dev/null; ip netns del ddlB%d 2>/dev/null; true", id, id);
    CHECK_EQ(system(command), 0);
    if (!made) {
        SKIP("needs root and `ip`, to make two network namespaces");
    }
}

/* ---- the exchange of the program's own ---- */

typedef struct gather {
    pthread_barrier_t all;
    uint8_t table[4 * 100];
} gather;

typedef struct member {
    gather *g;
    int rank, result;
} member;

static int exchange(void *user, const void *in, void *out, size_t bytes) {
    member *m = user;
    memcpy(m->g->table + (size_t)m->rank * bytes, in, bytes);
    pthread_barrier_wait(&m->g->all);
    memcpy(out, m->g->table, 4 * bytes);
    return m->result;
}

TEST(exchange_of_the_program) {
    gather g;
    member m[4];
    one ones[4];
    pthread_barrier_init(&g.all, NULL, 4);
    make_job(ones, 4, NULL);
    for (int r = 0; r < 4; r++) {
        m[r] = (member){&g, r, r == 3 ? 77 : 0};
        ones[r].config.exchange = exchange;
        ones[r].config.exchange_user = &m[r];
        ones[r].config.rendezvous = NULL;
    }
    run_all(ones, 4);
    check_good(ones, 3);
    CHECK_EQ(ones[3].status, DDL_ERR_SYSTEM);
    CHECK_STR(ones[3].why.text, "77");
    CHECK_STR(ones[3].why.text, "rank 3 of 4");
}

/* ---- memory ---- */

static int fail_at;
static __thread int allocs; /* each rank counts for itself */
static void *fail_alloc(void *user, size_t bytes) {
    (void)user;
    return allocs++ == fail_at ? NULL : malloc(bytes);
}
static void fail_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* Rank 0's n-th allocation fails: it says so, and the others do not hang. */
TEST(out_of_memory_is_clean) {
    ddl_status status = DDL_ERR_NOMEM;
    for (fail_at = 0; status != DDL_OK && fail_at < 50; fail_at++) {
        one ones[2];
        new_place();
        make_job(ones, 2, secret);
        ones[0].config.allocator = (ddl_allocator){fail_alloc, fail_free, NULL};
        ones[1].config.init_timeout_ms = 500;
        LEAKS_NOTHING(run_all(ones, 2));
        status = ones[0].status;
        CHECK(status == DDL_OK || status == DDL_ERR_NOMEM);
        CHECK(ones[1].status == DDL_OK || ones[1].status == DDL_ERR_TIMEOUT || ones[1].status == DDL_ERR_PEER);
    }
    CHECK(fail_at > 3 && fail_at < 50);
}

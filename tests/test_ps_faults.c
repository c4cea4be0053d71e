/* A worker is killed by SIGKILL in the middle of a run over parameter servers: SSP and ASP go on without it, BSP says who
 * died. A server is killed: every call that needs it says so, nobody hangs, and a new job goes on from its checkpoint.
 * tests/run: variants=gcc,asan */
#include "faults.h"
#include "ps.h"

enum { RANKS = 4, COUNT = 40000, STEPS = 12, DEATH = 5 };

typedef struct scenario {
    ddl_sync mode;
    int dedicated, servers;
    int victim; /* dies at step DEATH */
    int resume; /* from the folder */
    char folder[100];
} scenario;

typedef struct shared {
    scenario what;
    int ended[RANKS];   /* the last step that a worker finished */
    int errors[RANKS];  /* DDL_ERR_PEER with the right name */
} shared;

static int is_peer_error(ddl_group *w, ddl_status status, const shared *s) {
    char name[40];
    snprintf(name, sizeof name, s->what.victim >= s->what.servers && !s->what.dedicated ? "worker %d died" : "on rank %d",
             s->what.victim);
    const char *text = ddl_error(ddl_group_context(w));
    if (status != DDL_ERR_PEER || strstr(text, name) == NULL) {
        test__fail(__FILE__, __LINE__, "%s: \"%s\" lacks \"%s\"", ddl_status_name(status), text, name);
        return 0;
    }
    return 1;
}

static ddl_status step(ddl_group *w, ddl_ps *ps, float *grad, float *value, int k) {
    ddl_tensor g = ddl_tensor_1d(grad, DDL_F32, COUNT), v = ddl_tensor_1d(value, DDL_F32, COUNT);
    ddl_status status = ddl_ps_pull(ps, 0, v);
    (void)w;
    for (int i = 0; i < COUNT; i++) {
        grad[i] = (float)(k + i % 5);
    }
    status = status == DDL_OK ? ddl_ps_push(ps, 0, g, NULL) : status;
    return status == DDL_OK ? ddl_ps_clock(ps) : status;
}

static void fault_work(ddl_group *w, ddl_ps *ps, shared *s) {
    float *grad = (float *)malloc(COUNT * sizeof *grad), *value = (float *)malloc(COUNT * sizeof *value);
    int me = ps_worker(ps), k = 0;
    ddl_ps_info info;
    if (s->what.resume) {
        OK(ddl_ps_load(ps, s->what.folder));
        OK(ddl_ps_info_get(ps, &info));
        k = (int)info.clock;
        CHECK_EQ(k, 3);
    }
    ddl_status status = DDL_OK;
    int until_death = s->what.dedicated && s->what.victim >= 0;
    for (; (k < STEPS || until_death) && status == DDL_OK; k++) {
        if (k == DEATH && ddl_rank(w) == s->what.victim) {
            kill(getpid(), SIGKILL);
        }
        status = step(w, ps, grad, value, k);
        s->ended[me] = status == DDL_OK ? k : s->ended[me];
        if (k == 2 && s->what.folder[0] != 0 && status == DDL_OK) {
            OK(ddl_ps_save(ps, s->what.folder));
        }
    }
    s->errors[me] = status == DDL_OK ? 0 : is_peer_error(w, status, s);
    free(grad);
    free(value);
}

static void *die_at_step(void *arg) { /* a dedicated server: when a worker is there */
    const volatile shared *s = (const volatile shared *)arg;
    while (s->ended[0] < DEATH) {
        usleep(1000);
    }
    kill(getpid(), SIGKILL);
    return NULL;
}

static void fault_rank(ddl_group *w, void *arg) {
    shared *s = (shared *)arg;
    float *zeros = (float *)calloc(COUNT, sizeof *zeros);
    ddl_tensor param = ddl_tensor_1d(zeros, DDL_F32, COUNT);
    ddl_ps_config config = {.servers = s->what.servers,
                            .dedicated = s->what.dedicated,
                            .sync = {.mode = s->what.mode, .staleness = 2},
                            .op = DDL_SUM};
    ddl_ps *ps = NULL;
    pthread_t killer;
    REQUIRE(OK(ddl_ps_create(w, &config, &param, 1, &ps)) == DDL_OK);
    if (ps_worker(ps) >= 0) {
        fault_work(w, ps, s);
        ddl_ps_free(&ps); /* with a server gone it says so */
    } else {
        if (s->what.victim == ddl_rank(w)) {
            pthread_create(&killer, NULL, die_at_step, s);
        }
        OK(ddl_ps_serve(ps));
        OK(ddl_ps_free(&ps));
    }
    CHECK(ps == NULL);
    free(zeros);
}

static shared *run_scenario(scenario what) {
    ranks r;
    shared *s = (shared *)ranks_shared(sizeof *s);
    s->what = what;
    world in;
    memset(&in, 0, sizeof in);
    in.fn = fault_rank;
    in.arg = s;
    ranks_start(&r, RANKS, world_process, &in);
    ranks_wait(&r, 40);
    CHECK_EQ(r.timed_out, 0);
    for (int i = 0; i < RANKS; i++) {
        CHECK_EQ(r.status[i], i == what.victim ? SIGKILL : 0);
    }
    return s;
}

TEST(ssp_and_asp_go_on_without_a_worker_that_died) {
    const ddl_sync modes[] = {DDL_SYNC_SSP, DDL_SYNC_ASP};
    for (int m = 0; m < 2; m++) {
        shared *s = run_scenario((scenario){.mode = modes[m], .servers = 2, .victim = 3});
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(s->ended[i], STEPS - 1);
            CHECK_EQ(s->errors[i], 0);
        }
        CHECK_EQ(s->ended[3], DEATH - 1);
    }
}

TEST(bsp_says_which_worker_died) {
    shared *s = run_scenario((scenario){.mode = DDL_SYNC_BSP, .servers = 2, .victim = 3});
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s->errors[i], 1);
        CHECK(s->ended[i] >= DEATH - 2 && s->ended[i] <= DEATH);
    }
}

TEST(a_server_that_dies_is_named_and_a_new_job_goes_on_from_its_checkpoint) {
    scenario what = {.mode = DDL_SYNC_SSP, .servers = 1, .dedicated = 1, .victim = 3};
    snprintf(what.folder, sizeof what.folder, "/tmp/ddl-ps-fault-XXXXXX");
    REQUIRE(mkdtemp(what.folder) != NULL);
    shared *s = run_scenario(what);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s->errors[i], 1);
    }
    what.victim = -1;
    what.resume = 1;
    s = run_scenario(what);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s->errors[i], 0);
        CHECK_EQ(s->ended[i], STEPS - 1);
    }
    char command[200];
    snprintf(command, sizeof command, "rm -r %s", what.folder);
    CHECK_EQ(system(command), 0);
}

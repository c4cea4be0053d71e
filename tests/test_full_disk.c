/* A checkpoint that does not fit: every rank is told why, the checkpoint before still loads, nothing half-written is
 * left, and when there is room again the next one is written. The trainer's, whole and in shards, and servers'; by a
 * limit on the size of files, and on a file system that is full (root).
 * tests/run: variants=gcc,asan */
#include "world.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { COUNT = 50000 }; /* 200 KB: far beyond what is left, and not a multiple of a page */

typedef struct disk {
    char folder[64];
    bool full; /* a file of ours takes the room; else the limit of this process does */
    ddl_trainer_config config;
} disk;

static void limit_files(rlim_t bytes) {
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* Leaves less room than a checkpoint needs, or gives it back. One rank calls. */
static void fill(const disk *d, bool fills) {
    char path[80], block[4096] = {0};
    snprintf(path, sizeof path, "%s/other", d->folder);
    if (!d->full) {
        limit_files(fills ? 60000 : RLIM_INFINITY);
    } else if (!fills) {
        CHECK_EQ(unlink(path), 0);
    } else {
        struct stat st;
        FILE *file = fopen(path, "w");
        REQUIRE(file != NULL);
        setbuf(file, NULL);
        while (fwrite(block, 1, sizeof block, file) == sizeof block) {
        }
        fclose(file);
        CHECK_EQ(stat(path, &st), 0);
        CHECK_EQ(truncate(path, st.st_size - 61440), 0); /* some of a checkpoint can be written */
    }
}

/* Files of the folder that are no whole checkpoint. */
static int left_over(const disk *d) {
    int count = 0;
    DIR *dir = opendir(d->folder);
    for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
        count += strstr(e->d_name, "tmp") != NULL;
    }
    closedir(dir);
    return count;
}

/* On every rank, in step with the others. */
static void fill_together(ddl_group *w, const disk *d, bool fills) {
    OK(ddl_barrier(w));
    if (ddl_rank(w) == 0) {
        fill(d, fills);
    }
    OK(ddl_barrier(w));
}

static void train(ddl_group *w, void *arg) {
    const disk *d = arg;
    float *p = calloc(2 * COUNT, sizeof *p), *g = p + COUNT;
    const char *why = d->full ? "No space left on device" : "File too large";
    ddl_trainer *t = NULL;
    int64_t step = -7;
    OK(ddl_trainer_create(w, &d->config, &t));
    OK(ddl_trainer_add(t, "w", DDL_VIEW(p, COUNT), DDL_VIEW(g, COUNT), NULL, NULL));
    OK(ddl_trainer_start(t));
    for (int s = 1; s <= 3; s++) {
        for (int i = 0; i < COUNT; i++) {
            g[i] = (float)(i % 5);
        }
        OK(ddl_grad_ready(t, DDL_ALL));
        OK(ddl_step(t));
        if (s == 2) {
            fill_together(w, d, true);
            FAILS(ddl_trainer_save(t, d->folder), DDL_ERR_SYSTEM, why);
            CHECK_STR(ddl_error(ddl_group_context(w)), "still stand");
            fill_together(w, d, false);
            CHECK_EQ(left_over(d), 0);
            OK(ddl_barrier(w));
        } else {
            OK(ddl_trainer_save(t, d->folder));
        }
        if (s == 2) {
            memset(p, 0x7f, COUNT * sizeof *p);
            OK(ddl_trainer_load(t, d->folder, &step));
            CHECK_EQ(step, 1);
        }
        for (int i = 0; i < COUNT; i++) {
            CHECK_EQ(p[i], -(float)(i % 5) * (float)(s == 3 ? 2 : 1)); /* after the load it is step 1 again */
        }
    }
    memset(p, 0x7f, COUNT * sizeof *p);
    OK(ddl_trainer_load(t, d->folder, &step));
    CHECK_EQ(step, 2);
    CHECK_EQ(p[COUNT - 1], -8);
    OK(ddl_trainer_free(&t));
    free(p);
}

static void all_kinds(disk *d) {
    const ddl_trainer_config kinds[] = {
        {.optimizer = {.learning_rate = 1}},
        {.optimizer = {.learning_rate = 1}, .schedule = DDL_SCHEDULE_FUSED, .shard = 1},
        {.optimizer = {.learning_rate = 1}, .architecture = DDL_ARCHITECTURE_PS, .servers = 2},
    };
    char command[100];
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        d->config = kinds[i];
        world_threads(2, train, d);
        snprintf(command, sizeof command, "rm -f %s/*", d->folder);
        CHECK_EQ(system(command), 0);
    }
}

TEST(files_that_may_not_grow) {
    disk d = {.folder = "/tmp/ddl-full-XXXXXX"};
    signal(SIGXFSZ, SIG_IGN); /* the limit shall fail the write, not end the program */
    REQUIRE(mkdtemp(d.folder) != NULL);
    all_kinds(&d);
    CHECK_EQ(rmdir(d.folder), 0);
}

TEST(a_file_system_that_is_full) {
    disk d = {.folder = "/tmp/ddl-full-XXXXXX", .full = true};
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        SKIP("mounting a file system needs root");
    }
    REQUIRE(mkdtemp(d.folder) != NULL);
    if (mount("tmpfs", d.folder, "tmpfs", 0, "size=1200k") != 0) {
        rmdir(d.folder);
        SKIP("this machine does not let us mount a tmpfs");
    }
    all_kinds(&d);
    CHECK_EQ(umount(d.folder), 0);
    CHECK_EQ(rmdir(d.folder), 0);
}

/* The rendezvous through a folder: each rank gets each blob and nothing stays; late, slow and missing ranks; files of runs
 * that died, of other secrets and of recorded runs confuse nobody.
 * tests/run: waits=yes variants=gcc,asan,tsan timeout=90 quick=yes */
#include "rendezvous.h"

static char folder[100];

static void new_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/ddl-test-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    snprintf(rendezvous, sizeof rendezvous, "file://%s", folder);
}

static int entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        n += e->d_name[0] != '.' || (e->d_name[1] != 0 && e->d_name[1] != '.');
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

static void shell(const char *format, const char *a, const char *b) {
    char command[500];
    snprintf(command, sizeof command, format, a, b);
    CHECK_EQ(system(command), 0);
}

TEST(folder) {
    new_folder();
    all_sizes(NULL);
    CHECK_EQ(entries(folder), 0); /* it leaves nothing */
    all_sizes(secret);
    CHECK_EQ(entries(folder), 0);
    CHECK_EQ(rmdir(folder), 0);
}

TEST(folder_late_ranks) {
    new_folder();
    for (int way = 0; way < 2; way++) {
        one ones[4];
        make_job(ones, 4, NULL);
        for (int r = 0; r < 4; r++) {
            ones[r].delay_ms = way == (r == 0) ? 400 : 0;
        }
        LEAKS_NOTHING(run_all(ones, 4));
        check_good(ones, 4);
    }
    CHECK_EQ(rmdir(folder), 0);
}

static void folder_file(char out[300], const char *name) {
    char command[300] = "";
    snprintf(command, sizeof command, "ls -d %s/ddl-*/%s 2>/dev/null", folder, name);
    FILE *f = popen(command, "r");
    out[0] = 0;
    (void)!fgets(out, 300, f);
    pclose(f);
}

/* Rank 1 is stopped when it has given its blob, and goes on long after the others have all: the table waits for it. */
TEST(folder_keeps_the_table_for_a_slow_rank) {
    one ones[3];
    char found[300] = "";
    new_folder();
    make_job(ones, 3, secret);
    pid_t slow = spawn(&ones[1]), first = spawn(&ones[0]);
    for (double end_s = test_now_s() + 10 * test_slow(); found[0] == 0 && test_now_s() < end_s;) {
        folder_file(found, "rank.1");
    }
    CHECK_STR(found, "rank.1");
    kill(slow, SIGSTOP);
    run_all(&ones[2], 1);
    check_good(&ones[2], 1);
    int status = -1;
    CHECK_EQ(waitpid(first, &status, 0), first);
    CHECK_EQ(status, 0);
    folder_file(found, "table");
    CHECK_STR(found, "table");
    kill(slow, SIGCONT);
    CHECK_EQ(waitpid(slow, &status, 0), slow);
    CHECK_EQ(status, 0);
    CHECK_EQ(entries(folder), 0); /* and the slow one has cleaned up */
    shell("rm -rf %s%s", folder, "");
}

TEST(folder_missing_ranks_are_named) {
    new_folder();
    missing(NULL, -1);
    missing(secret, -1);
    shell("rm -r %s%s", folder, "");
}

/* The files of a job that was killed, in every stage, are there when the next begins: the right blobs arrive all the
 * same. */
TEST(folder_stale_files_do_not_confuse) {
    new_folder();
    for (int moment = 0; moment < 12; moment++) {
        one ones[4];
        pid_t pids[4];
        make_job(ones, 4, NULL);
        for (int r = 0; r < 4; r++) {
            ones[r].mark = 50u + (unsigned)moment;
            ones[r].delay_ms = moment % 3 == 0 && r == 3 ? 1000 : moment % 3 == 1 && r == 0 ? 1000 : 0;
            pids[r] = spawn(&ones[r]);
        }
        usleep((useconds_t)(2000 + moment * 2000));
        for (int r = 0; r < 4; r++) {
            end(pids[r]);
        }
        for (int r = 0; r < 4; r++) {
            ones[r].mark = 100u + (unsigned)moment;
            ones[r].delay_ms = r == moment % 4 ? 60 : 0;
        }
        run_all(ones, 4);
        check_good(ones, 4);
    }
    shell("rm -rf %s%s", folder, "");
}

/* A whole job's files, complete table included, put back before the next run. */
TEST(folder_replayed_files_do_not_confuse) {
    char copy[120];
    new_folder();
    snprintf(copy, sizeof copy, "%s-copy", folder);
    one ones[3];
    make_job(ones, 3, NULL);
    for (int r = 0; r < 3; r++) {
        ones[r].mark = 9;
        ones[r].config.init_timeout_ms = 700;
    }
    run_all(ones, 2); /* rank 2 does not come: the table of the failure stays */
    CHECK_EQ(ones[0].status, DDL_ERR_TIMEOUT);
    shell("cp -r %s %s", folder, copy);
    make_job(ones, 3, NULL);
    pid_t zero = spawn(&ones[0]), first = spawn(&ones[1]);
    ddl__pause_ms(300);
    end(zero);
    end(first);
    shell("cp -rn %s/. %s", folder, copy);
    for (int again = 0; again < 3; again++) {
        shell("cp -r %s/. %s", copy, folder);
        for (int r = 0; r < 3; r++) {
            ones[r].mark = 20u + (unsigned)again;
            ones[r].delay_ms = r == again ? 200 : 0;
        }
        run_all(ones, 3);
        check_good(ones, 3);
    }
    shell("rm -rf %s %s", folder, copy);
}

TEST(folder_files_of_another_secret_are_ignored) {
    one ones[3];
    new_folder();
    make_job(ones, 2, secret);
    ones[2] = rank_of(2, 1, "another secret, which is wrong");
    ones[2].config.init_timeout_ms = 1500;
    ones[0].config.init_timeout_ms = 700;
    ones[1].delay_ms = 1500;
    ones[1].config.init_timeout_ms = 100;
    run_all(ones, 3);
    CHECK_EQ(ones[0].status, DDL_ERR_TIMEOUT);
    CHECK_STR(ones[0].why.text, "rank 1 of 2 has not come");
    CHECK_EQ(ones[2].status, DDL_ERR_TIMEOUT);
    shell("rm -rf %s%s", folder, "");
}

TEST(folder_duplicate_rank_is_told) {
    one ones[4];
    new_folder();
    make_job(ones, 3, NULL);
    ones[3] = rank_of(3, 1, NULL);
    ones[3].delay_ms = 300;
    ones[2].delay_ms = 900;
    run_all(ones, 4);
    CHECK_EQ(ones[0].status, DDL_OK);
    CHECK_EQ(ones[2].status, DDL_OK);
    CHECK(ones[0].table_right && ones[2].table_right);
    CHECK_EQ((ones[1].status == DDL_OK) + (ones[3].status == DDL_OK), 1);
    const one *loser = ones[1].status == DDL_OK ? &ones[3] : &ones[1];
    CHECK_EQ(loser->status, DDL_ERR_CONFIG);
    CHECK_STR(loser->why.text, "another process has come as rank 1");
    shell("rm -rf %s%s", folder, "");
}

TEST(folder_that_cannot_be_used_is_named) {
    one o = rank_of(2, 0, NULL);
    snprintf(rendezvous, sizeof rendezvous, "file:///nonexistent/folder");
    run_all(&o, 1);
    CHECK_EQ(o.status, DDL_ERR_SYSTEM);
    CHECK_STR(o.why.text, "/nonexistent/folder");
    CHECK_STR(o.why.text, strerror(ENOENT));
}

"""ddl-info --attach tells what the ranks of a running job do and who waits for whom, though they compute or are
stopped, and refuses what it may not or cannot see. The oracle is the program that the ranks run.
    tests/run: timeout=200 waits=yes
"""
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time

from harness import BUILD, ROOT, WARNINGS, check, good, main, sh, skip, test
from jobs import SLOW, Job, two_hosts

INFO = BUILD / "ddl-info"
RANK = BUILD / "tests" / "attach_rank"


def built():
    good("make -s", f"B={BUILD}", BUILD / "libddl.a", BUILD / "libddl-shm.so", BUILD / "ddlrun", INFO, timeout=300)
    RANK.parent.mkdir(parents=True, exist_ok=True)
    good("gcc -std=c11", *WARNINGS, "-g", f"-I{ROOT}", "-o", RANK, ROOT / "tests" / "attach_rank.c", BUILD / "libddl.a",
         "-lpthread -ldl")


def job(*words, **more):
    return Job(RANK, " ".join(map(str, words)), DDL_STALL_MS=-1, **more)


def attach(what, **options):
    done = sh([INFO, "--attach", what], **options)
    return done.returncode, done.stdout


def until(what, *wanted, seconds=30):
    """Attaches until all that is wanted is told: the ranks need a moment until they have waited for long."""
    end = time.monotonic() + seconds * SLOW
    while True:
        code, out = attach(what)
        if code == 0 and all(re.search(w, out) for w in wanted):
            return out
        check(time.monotonic() < end, f"{[w for w in wanted if not re.search(w, out)]} not told by:\n{out}")
        time.sleep(0.1)


def of_rank(out, rank):
    return re.search(rf"^rank {rank} .*?(?=^rank |^$)", out, re.M | re.S)[0]


@test
def a_rank_that_computes():
    with job("late", 2, 60, DDL_JOB="attached") as j:
        j.until("ready")
        out = until(j.process[0].pid, r"3 ranks wait for rank 2 \(pid \d+\), which computes: it waits in no call of "
                                      r"ddl; its last collective ended [\d.]+ s ago")
        check("job attached of 4 ranks; 4 are seen here" in out, out)
        for rank, p in j.process.items():
            mine = of_rank(out, rank)
            check(f"rank {rank} (pid {p.pid}, " in mine and f'group "world", rank {rank} of 4' in mine, mine)
            check(re.search(r"#\d+ all_reduce\(5 x f32, max\) by \w+ DDL_OK in [\d.]+ us, ", mine), mine)
            check(("waits for" in mine and re.search(r"#\d+ barrier\(\) by \w+, began ", mine)) or rank == 2, mine)
            check(re.search(r"links: 3 alive by \w+;", mine), mine)
            check(('group "pair"' in mine) == (rank < 2), mine)
        check("began" not in of_rank(out, 2), "a rank that computes has no operation")
        last = attach(j.process[3].pid)[1].splitlines()[-1]
        check(last.startswith("3 ranks wait for rank 2"), f"from another rank: {last}")
        code, out = attach("attached")
        check(code == 0 and "4 are seen here" in out, out)


@test
def for_machines():
    """--json tells the same, and json.loads takes it; numbers are whole, and not rounded for people."""
    with job("late", 2, 60, DDL_JOB="machine \"read\"") as j:
        j.until("ready")
        until(j.process[0].pid, "3 ranks wait for rank 2")
        told = json.loads(good([INFO, "--json", "--attach", j.process[1].pid]))
        check(list(told) == ["version", "job", "world_size", "ranks", "slow_rank", "slow_link", "waiting", "causes"], f"{list(told)}")
        check(told["job"] == "machine \"read\"" and told["world_size"] == 4 and told["waiting"] == 3, f"{told}")
        check([c["rank"] for c in told["causes"]] == [2] and told["causes"][0]["text"].startswith("computes"), f"{told['causes']}")
        check([(r["rank"], r["pid"]) for r in told["ranks"]] == [(r, j.process[r].pid) for r in range(4)], f"{told['ranks']}")
        check([r["waits"] for r in told["ranks"]] == [True, True, False, True], f"{told['ranks']}")
        for r in told["ranks"]:
            names = [g["name"] for g in r["groups"]]
            check(names == ["world", "pair"][:2 if r["rank"] < 2 else 1] and r["groups"][0]["size"] == 4, f"{r}")
            check([link["rank"] for link in r["links"]] == [k for k in range(4) if k != r["rank"]], f"{r}")
            check({link["transport"] for link in r["links"]} == {"tcp"} and r["links"][0]["life"] == "alive", f"{r}")
        newest = told["ranks"][0]["groups"][0]["operations"][0]
        check(newest["status"] == "DDL_IN_PROGRESS" and newest["call"].startswith("barrier()") and newest["seconds"] > 0.1 and
              round(newest["seconds"], 6) != newest["seconds"], f"{newest}")
    with job("slow", 2, 0, DDL_TRANSPORTS="tcp", DDL_ALGO="recursive_doubling") as j:
        j.until("ready")
        until(j.process[0].pid, "the slow rank is rank 2")
        told = json.loads(good([INFO, "--json", "--attach", j.process[0].pid]))
        check(told["slow_rank"]["rank"] == 2 and told["slow_rank"]["was_last"] >= 8 and told["slow_rank"]["late_seconds"] > 0.01
              and told["slow_link"] is None, f"{told['slow_rank']}, {told['slow_link']}")


@test
def a_rank_that_is_stopped():
    with job("late", 1, 60) as j:
        j.until("ready")
        j.signal(1, signal.SIGSTOP)
        out = until(j.process[2].pid,
                    r"3 ranks wait for rank 1 \(pid \d+\), which is stopped \(kill -CONT lets it go on\)")
        check(f"rank 1 (pid {j.process[1].pid}, stopped)" in out, out)
        j.signal(0, signal.SIGSTOP)  # one that waits itself: what it waits for is told still
        until(j.process[0].pid, r"rank 0 \(pid \d+, stopped\) waits for .* barrier\(\)")


@test
def two_that_are_missing():
    """Both are named, though nobody may wait for each of them himself."""
    with job("both", 2, 60) as j:
        j.until("ready")
        until(j.process[0].pid, *(rf"2 ranks wait for rank {r} \(pid \d+\), which computes" for r in (2, 3)))


def verdict(job, rank, *wanted, seconds=30):
    """Waits until ddl_stats of a rank says so of the slow rank and the slow link; None: whatever."""
    end = time.monotonic() + seconds * SLOW
    while True:
        said = [tuple(map(int, line.split())) for line in job.lines(rank, "verdict")][-1:]
        if said and all(w is None or w == s for w, s in zip(wanted, said[0])):
            return
        job.check(time.monotonic() < end, f"rank {rank} says {said}, not {wanted}")
        time.sleep(0.1)


@test
def a_rank_that_is_slow():
    """By messages and by shared memory: ddl_stats of the others names it, and so does --attach."""
    for how in ({"DDL_TRANSPORTS": "tcp", "DDL_ALGO": "recursive_doubling"}, {"DDL_TRANSPORTS": "shm", "DDL_PLUGIN_PATH": BUILD}):
        with job("slow", 2, 0, **how) as j:
            j.until("ready")
            for rank in (0, 3):  # who hear from it by messages too
                verdict(j, rank, 2, None)
            out = until(j.process[1].pid, r"the slow rank is rank 2: the others found it last \d+ times and waited")
            check("no link stands out as slow" in out, out)


@test
def a_link_that_becomes_slow():
    """A ring of three on two hosts; what leaves rank 0's host passes a narrow cable after a while, and then no more."""
    with two_hosts() as hosts, job("large", 0, 0, hosts=hosts, layout="ABB", DDL_ALGO="ring", DDL_TRANSPORTS="tcp") as j:
        j.until("ready")
        verdict(j, 1, None, -1)
        narrow = sh(hosts.into("A"), "tc qdisc add dev ddla root tbf rate 40mbit burst 32k latency 300ms")
        if narrow.returncode:
            skip(f"tc cannot do tbf here: {narrow.stdout.strip()[:100]}")
        verdict(j, 1, None, 0)
        said = r"the slow link is that from rank 0 to rank 1: (\d+\.\d{3}) MB/s, the usual one of its kind (\d+\.\d{3}) MB/s"
        out = until(j.process[2].pid, said)
        slow, usual = map(float, re.search(said, out).groups())
        check(0 < slow * 4 < usual, out)
        good(hosts.into("A"), "tc qdisc del dev ddla root")
        verdict(j, 1, None, -1)
        until(j.process[1].pid, "no link stands out as slow")


@test
def a_message_that_does_not_come():
    """Rank 0 waits for rank 1, all others for them: the cause is told, not those in between."""
    with job("message", 1, 60) as j:
        j.until("ready")
        out = until(j.process[3].pid, r"ranks wait for rank 1 \(pid", r"rank 0 \(pid \d+, \w+\) waits for .*rank 1")
        check("wait for rank 0" not in out.splitlines()[-1], out)


@test
def a_wait_without_a_request():
    with job("agree", 1, 60, ranks=3) as j:
        j.until("ready")
        until(j.process[0].pid, r"rank 0 \(pid \d+, \w+\) is in ddl_agree for (?!0\.0)",
              r"rank 1 \(pid \d+, \w+\) computes")


@test
def a_rank_that_has_not_come():
    with job("late", 0, 0, ranks=3, only=[0, 2], DDL_JOB="incomplete") as j:
        out = until("incomplete", r"rank 0 \(pid \d+, \w+\) is in ddl_init for [\d.]+ s: not all ranks have come",
                    r"rank 2 \(")
        check("of 3 ranks; 2 are seen here" in out, out)
        j.start(1)
        j.succeed()


@test
def by_its_launcher():
    env = {k: v for k, v in os.environ.items() if not k.startswith("DDL_")}
    with subprocess.Popen([BUILD / "ddlrun", "-n", "2", "--no-prefix", RANK, "late", "1", "60"], env=env,
                          stdout=subprocess.PIPE, text=True) as launcher:
        try:
            [launcher.stdout.readline() for _ in range(2)]
            until(launcher.pid, "of 2 ranks; 2 are seen here", r"1 rank waits for rank 1 \(pid \d+\), which computes")
        finally:
            launcher.terminate()


@test
def a_process_of_another_user():
    if os.geteuid() != 0:
        skip("only root can become another user")
    with job("late", 1, 60, ranks=2) as j:
        j.until("ready")
        pid = j.process[0].pid
        with open(INFO, "rb") as file:
            program = os.memfd_create("ddl-info", 0)  # the build's folder may be closed to others
            os.sendfile(program, file.fileno(), 0, os.fstat(file.fileno()).st_size)
        done = sh([f"/proc/self/fd/{program}", "--attach", pid], user=65534, group=65534, extra_groups=[],
                  pass_fds=[program], cwd="/")
        os.close(program)
        check(done.returncode == 1 and f"Process {pid} belongs to user root (0)" in done.stdout and
              f"sudo -u root ddl-info --attach {pid}" in done.stdout and "rank" not in done.stdout, done.stdout)
    with contextlib.ExitStack() as stack:  # nor does root look at others
        other = stack.enter_context(subprocess.Popen(["sleep", "60"], user=65534))
        stack.callback(other.kill)
        code, out = attach(other.pid)
        check(code == 1 and "belongs to user nobody (65534)" in out, out)


@test
def what_is_no_job():
    with subprocess.Popen(["sleep", "60"]) as other:
        for what, said in ((other.pid, f"Process {other.pid} is no rank of a ddl job, and has started none"),
                           ("no-such-job", 'No job of this user on this host is called "no-such-job"'),
                           (2 ** 31 - 7, "There is no process 2147483641 here")):
            code, out = attach(what)
            check(code == 1 and said in out and len(out.splitlines()) == 1, out)
        other.kill()
        time.sleep(0.2)
        code, out = attach(other.pid)
        check(code == 1 and "has ended" in out, out)
    for words, said in ((["--attach"], "--attach needs"), (["--doctor", "--attach", "1"], "give one"),
                        (["--attach", "--json"], "--attach needs"), (["--group"], "--group needs"),
                        (["--attach", "-1"], "--attach needs"), (["--group", "0", "--attach", "1"], "tell none")):
        done = sh([INFO, *words])
        check(done.returncode == 2 and said in done.stdout, done.stdout)


@test
def a_job_that_ends_meanwhile():
    """While it works at full speed, and until after its end: a whole answer or a refusal, nothing else."""
    with job("busy", 0, 0, ranks=3) as j:
        j.until("ready")
        pid, answers = j.process[0].pid, []
        for i in range(30):
            if i == 10:
                for rank in j.process:
                    j.signal(rank, signal.SIGKILL)
            if i == 20:
                j.finish()
            code, out = attach(pid)
            answers.append(code)
            check((code == 0 and re.search(r"^rank 0 ", out, re.M)) or
                  (code == 1 and out.startswith("ddl-info: ") and len(out.splitlines()) == 1), f"{code}: {out}")
            if i < 10:
                seen = "3 are seen here" in out and re.search(r"#\d+ all_reduce\(5 x f32, max\)", out)
                check(code == 0 and seen, out)
        check(answers[:10] == [0] * 10 and answers[20:] == [1] * 10, f"{answers}")


@test
def a_page_that_lies():
    """Copies of a true page with wrong bytes, as this process's own: never a crash, no control character."""
    with job("late", 1, 60, ranks=2) as j:
        j.until("ready")
        folder = f"/proc/{j.process[0].pid}/fd"
        name = next(n for n in os.listdir(folder) if os.readlink(f"{folder}/{n}").startswith("/memfd:ddl-page"))
        with open(f"{folder}/{name}", "rb") as file:
            true = file.read()
    dice = random.Random(7)
    said = set()
    for i in range(60):
        page = bytearray(true)
        limit = 400 if i % 2 else len(page)  # the head, or all of it
        for _ in range(dice.choice((1, 20, 2000)) if i > 3 else 0):
            page[dice.randrange(4 if i % 5 else 0, limit)] = dice.choice((0, 1, 27, 127, 255, dice.randrange(256)))
        page = page[:dice.randrange(len(page))] if i % 10 == 9 else page
        fd = os.memfd_create("ddl-page", 0)
        os.write(fd, page)
        code, out = attach(os.getpid())
        os.close(fd)
        check(code in (0, 1) and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out), f"{i}: {code}: {out!r}")
        said.add("another version" if "another version" in out else code)
    check(said == {0, "another version"}, f"{said}")


built()
main()

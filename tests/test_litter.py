#!/usr/bin/env python3
"""All ranks of a job are killed by SIGKILL at random points of start, run and end. Nothing is left in /dev/shm, /tmp,
the abstract sockets or among the processes, and the job starts again on the same port at once.

TEST_TORTURE=1: 100 kills; TEST_SEED repeats a run."""
import os
import random
import signal
import subprocess
import tempfile
import time

from faults import fault_rank, free_port
from harness import check, main, test

SLOW = float(os.environ.get("TEST_SLOW", 1))
RANKS = 4


def start(program, rounds, port, secret, folder):
    """The ranks of a job. Without a secret they use unix sockets; with a folder they meet in it."""
    ranks = []
    for rank in range(RANKS):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                   LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DDL_LOG="none",
                   DDL_TIMEOUT_MS="20000", DDL_INIT_TIMEOUT_MS=str(int(20000 * SLOW)), TMPDIR=folder)
        if secret:
            env["DDL_SECRET"] = "0123456789abcdef0123456789abcdef"
        ranks.append(subprocess.Popen([str(program), str(rounds)], env=env, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder))
    return ranks


def litter(folder, pids):
    """Everything that a job could leave behind."""
    with open("/proc/net/unix") as table:
        sockets = {line.split()[-1] for line in table if "@ddl" in line}
    mine = {s for s in sockets if any(f"-{pid}-" in s or s.endswith(f"-{pid}") for pid in pids)}
    found = {f"socket {s}" for s in mine}
    for place in ("/dev/shm", "/tmp", "/run/user/%d" % os.getuid(), "/run"):
        if os.path.isdir(place):
            found |= {f"{place}/{name}" for name in os.listdir(place)
                      if name.startswith((".ddl", "ddl-", "ddl_")) and not name.startswith("ddl-test-")}
    return found | {f"{folder}/{name}" for name in os.listdir(folder)}


def one_kill(program, pick, folder, before):
    port, secret, rounds = free_port(), pick.random() < 0.7, pick.choice([-1, 3, 40])
    ranks = start(program, rounds, port, secret, folder)
    delay = pick.choice([0.02, 0.1, 0.3]) * pick.random()
    time.sleep(delay)
    for rank in pick.sample(ranks, RANKS):
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate()
    left = litter(folder, [r.pid for r in ranks]) - before
    what = f"killed after {delay * 1e3:.1f} ms, {rounds} rounds, {'tcp' if secret else 'unix sockets'}"
    check(not left, f"{what}: left behind: {sorted(left)}")
    begun = time.monotonic()
    again = start(program, 3, port, secret, folder)
    for rank in again:
        try:
            _, text = rank.communicate(timeout=30 * SLOW)
        except subprocess.TimeoutExpired:
            for other in again:
                other.kill()
            check(False, f"{what}: the restart hangs")
        check(rank.returncode == 0, f"{what}: the restart ended with {rank.returncode}: {text}")
    return time.monotonic() - begun


@test
def a_killed_job_leaves_nothing_and_starts_again_at_once():
    seed = int(os.environ.get("TEST_SEED", int(time.time() * 1000) % 1000000))
    runs = int(os.environ.get("FAULT_RUNS", 100 if "TEST_TORTURE" in os.environ else 10))
    print(f"litter: TEST_SEED={seed}", flush=True)
    pick, program, times = random.Random(seed), fault_rank(), []
    with tempfile.TemporaryDirectory(prefix="ddl-test-") as folder:
        before = litter(folder, [])
        for _ in range(runs):
            times.append(one_kill(program, pick, folder, before))
    print(f"  {runs} kills; whole jobs on the same port took {max(times):.2f} s at most", flush=True)
    check(sorted(times)[len(times) // 2] < 2 * SLOW, f"restarts took {times}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""All ranks of a job are killed by SIGKILL at random points of start, run and end, over sockets, over shared memory and
over libfabric. Nothing is left: no file in /dev/shm or /tmp, no socket, no file of memory, no process; and the job starts again on the
same port at once.

TEST_TORTURE=1: 100 kills of each; TEST_SEED repeats a run."""
import os
import random
import re
import signal
import subprocess
import tempfile
import time

from faults import fault_rank
from harness import BUILD, check, main, skip, test
from jobs import free_port

SLOW = float(os.environ.get("TEST_SLOW", 1))
RANKS = 4


def start(program, rounds, port, secret, folder, transport):
    """The ranks of a job. Without a secret they use unix sockets; with a folder they meet in it."""
    ranks = []
    for rank in range(RANKS):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                   LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DDL_LOG="none",
                   DDL_TIMEOUT_MS="20000", DDL_INIT_TIMEOUT_MS=str(int(20000 * SLOW)), TMPDIR=folder,
                   DDL_TRANSPORTS=transport, DDL_PLUGIN_PATH=str(BUILD))
        if secret:
            env["DDL_SECRET"] = "0123456789abcdef0123456789abcdef"
        ranks.append(subprocess.Popen([str(program), str(rounds)], env=env, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder,
                                      start_new_session=True))
    return ranks


def held(pid):
    """What a process holds open that could outlive it: sockets, and files of memory, by their numbers."""
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            if name.startswith("socket:"):
                found.add(("socket", int(re.search(r"\d+", name)[0])))
            elif name.startswith("/memfd:"):
                found.add((name.split()[0], os.stat(f"/proc/{pid}/fd/{fd}").st_ino))
    except (FileNotFoundError, ProcessLookupError):
        pass  # closed meanwhile, by its end
    return found


def has_libfabric(pid):
    try:
        with open(f"/proc/{pid}/maps") as lines:
            return any("/libfabric.so" in line for line in lines)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended meanwhile


def still_there(things, sessions):
    """Which of these sockets and files of memory exist, and which processes of these sessions."""
    left = set()
    for table, column in (("unix", 6), ("tcp", 9), ("tcp6", 9)):
        with open(f"/proc/net/{table}") as lines:
            numbers = {line.split()[column] for line in list(lines)[1:]}
        left |= {f"{table} socket {n}" for kind, n in things if kind == "socket" and str(n) in numbers}
    memory = {thing for thing in things if thing[0] != "socket"}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) in sessions:
                left.add(f"process {pid}")
            left |= {f"{name} held by {pid}" for name, n in held(pid) & memory}
        except (ProcessLookupError, PermissionError):
            pass
    return left


def files(folder):
    """Every file that a job could leave behind."""
    found = set()
    for place in ("/dev/shm", "/tmp", "/run/user/%d" % os.getuid(), "/run"):
        if os.path.isdir(place):
            found |= {f"{place}/{name}" for name in os.listdir(place)
                      if name.startswith((".ddl", "ddl-", "ddl_")) and not name.startswith("ddl-test-")}
    return found | {f"{folder}/{name}" for name in os.listdir(folder)}


def kill_all(ranks, pick):
    """Stops all, looks at what they hold, and kills them in any order."""
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(0.002)
    things = set().union(*(held(rank.pid) for rank in ranks))
    things |= {("libfabric", 0) for rank in ranks if has_libfabric(rank.pid)}
    alive = {rank.pid for rank in ranks if rank.poll() is None}
    seen = still_there(things, alive)
    check(len(seen) >= len(alive), f"of {len(alive)} living ranks and {len(things)} things it sees {sorted(seen)} alone")
    for rank in pick.sample(ranks, RANKS):
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.communicate()
    return things


def one_kill(program, pick, folder, before, transport):
    port, secret, rounds = free_port(), pick.random() < 0.7, pick.choice([-1, 3, 40])
    ranks = start(program, rounds, port, secret, folder, transport)
    slow_start = 5 if transport.startswith("fabric") else 1  # libfabric takes a quarter of a second of each rank
    delay = pick.choice([0.02, 0.1, 0.3]) * pick.random() * slow_start
    time.sleep(delay)
    things = kill_all(ranks, pick)
    left = (files(folder) - before) | still_there(things, {rank.pid for rank in ranks})
    what = f"killed after {delay * 1e3:.1f} ms, {rounds} rounds, {transport}, {'a secret' if secret else 'no secret'}"
    check(not left, f"{what}: left behind: {sorted(left)}")
    begun = time.monotonic()
    again = start(program, 3, port, secret, folder, transport)
    for rank in again:
        try:
            _, text = rank.communicate(timeout=30 * SLOW)
        except subprocess.TimeoutExpired:
            for other in again:
                other.kill()
            check(False, f"{what}: the restart hangs")
        check(rank.returncode == 0, f"{what}: the restart ended with {rank.returncode}: {text}")
    return time.monotonic() - begun, things


def kills(transport, normal=10):
    seed = int(os.environ.get("TEST_SEED", int(time.time() * 1000) % 1000000))
    runs = int(os.environ.get("FAULT_RUNS", 100 if "TEST_TORTURE" in os.environ else normal))
    print(f"litter of {transport}: TEST_SEED={seed}", flush=True)
    pick, program, times, seen = random.Random(seed), fault_rank(), [], set()
    with tempfile.TemporaryDirectory(prefix="ddl-test-") as folder:
        before = files(folder)
        for _ in range(runs):
            took, things = one_kill(program, pick, folder, before, transport)
            times.append(took)
            seen |= {kind for kind, _ in things}
    print(f"  {runs} kills; whole jobs on the same port took {max(times):.2f} s at most; "
          f"held at the time: {', '.join(sorted(seen))}", flush=True)
    check(sorted(times)[len(times) // 2] < 2 * SLOW, f"restarts took {times}")
    return seen


@test
def a_killed_job_leaves_nothing_and_starts_again_at_once():
    check("socket" in kills("tcp"), "no rank was seen with a socket: this looked at nothing")


@test
def so_it_does_over_shared_memory():
    if not (BUILD / "libddl-shm.so").exists():
        skip("libddl-shm.so is not built; make plugins builds it")
    check("/memfd:ddl-shm" in kills("shm"), "no rank was seen with shared memory: this looked at nothing")


@test
def so_it_does_over_libfabric():
    if not (BUILD / "libddl-fabric.so").exists():
        skip("libddl-fabric.so is not built; make plugins builds it, where libfabric is")
    check("libfabric" in kills("fabric:tcp", 5), "no rank was seen with libfabric: this looked at nothing")


if __name__ == "__main__":
    main()

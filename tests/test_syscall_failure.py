#!/usr/bin/env python3
"""The n-th call of each system call fails, once, in one rank of a running job (strace -e inject). Every rank then ends by
itself: with success, or with a status and a sentence; never by a signal, never with wrong bits, never hanging. Over TCP,
and over libfabric, whose own calls fail then.

TEST_TORTURE=1 tries every call and error for each n up to DEEP, and as many beyond; else a sample drawn by TEST_SEED.
tests/run: timeout=300 waits=yes """
import concurrent.futures
import functools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time

from faults import fault_rank
from harness import BUILD, check, main, skip, test
from jobs import free_port

SLOW = float(os.environ.get("TEST_SLOW", 1))
LIMIT_S = 25 * SLOW
AT_ONCE = 4  # most of a failing job is waiting for a deadline
DEEP = 50

# Call, errors, how often a rank makes it at most that is worth trying. Not all are reached: how many is counted.
TCP = [
    ("socket", ["EMFILE", "ENOBUFS"], 6),
    ("bind", ["EADDRINUSE", "EACCES"], 3),
    ("listen", ["EADDRINUSE"], 2),
    ("accept4", ["EMFILE", "ECONNABORTED", "EINTR"], 4),
    ("connect", ["ECONNREFUSED", "EINTR", "ENETUNREACH"], 4),
    ("sendmsg", ["ECONNRESET", "EPIPE", "ENOBUFS", "EINTR", "EAGAIN"], 12),
    ("sendto", ["ECONNRESET", "EPIPE", "EINTR", "EAGAIN"], 8),
    ("recvfrom", ["ECONNRESET", "EINTR", "EAGAIN", "ENOMEM"], 12),
    ("readv", ["ECONNRESET", "EINTR", "EAGAIN"], 8),
    ("epoll_create1", ["EMFILE"], 3),
    ("epoll_ctl", ["ENOMEM", "ENOSPC"], 10),
    ("epoll_wait", ["EINTR"], 12),
    ("poll", ["EINTR", "ENOMEM"], 10),
    ("eventfd2", ["EMFILE"], 1),
    ("pidfd_open", ["ENOSYS", "EMFILE"], 2),
    ("getrandom", ["ENOSYS", "EAGAIN", "EINTR"], 4),
    ("memfd_create", ["ENOSYS", "EMFILE"], 1),
    ("fallocate", ["ENOSPC"], 1),
    ("getsockname", ["ENOBUFS"], 3),
    ("setsockopt", ["ENOPROTOOPT"], 8),
    ("write", ["EAGAIN", "EINTR"], 4),
    ("prlimit64", ["EPERM"], 2),
    ("sched_getaffinity", ["EINVAL"], 1),
]

# Most of the calls of libfabric's providers come before the rank meets anybody: all that a rank makes are worth trying,
# but for memory that the dynamic loader asks for before main.
FABRIC = [
    ("socket", ["EMFILE", "ENOBUFS"], 200),
    ("socketpair", ["EMFILE"], 9),
    ("bind", ["EADDRINUSE", "EACCES"], 66),
    ("listen", ["EADDRINUSE"], 6),
    ("accept", ["EMFILE", "ECONNABORTED", "EINTR"], 6),
    ("accept4", ["EMFILE", "ECONNABORTED", "EINTR"], 18),
    ("connect", ["ECONNREFUSED", "EINTR", "ENETUNREACH"], 7),
    ("sendmsg", ["ECONNRESET", "EPIPE", "ENOBUFS", "EINTR", "EAGAIN"], 32),
    ("sendto", ["ECONNRESET", "EPIPE", "EINTR", "EAGAIN"], 200),
    ("recvfrom", ["ECONNRESET", "EINTR", "EAGAIN", "ENOMEM"], 130),
    ("recvmsg", ["ECONNRESET", "EINTR", "EAGAIN", "ENOMEM"], 270),
    ("epoll_create", ["EMFILE"], 3),
    ("epoll_create1", ["EMFILE"], 7),
    ("epoll_ctl", ["ENOMEM", "ENOSPC"], 80),
    ("epoll_wait", ["EINTR"], 60),
    ("poll", ["EINTR", "ENOMEM"], 290),
    ("getsockname", ["ENOBUFS"], 63),
    ("getsockopt", ["ENOBUFS"], 16),
    ("getpeername", ["ENOTCONN"], 6),
    ("shutdown", ["ENOTCONN"], 12),
    ("setsockopt", ["ENOPROTOOPT"], 41),
    ("fcntl", ["EINVAL"], 64),
    ("mmap", ["ENOMEM"], 120),
    ("pidfd_open", ["ENOSYS", "EMFILE"], 2),
    ("openat", ["EMFILE"], 200),
    ("write", ["EAGAIN", "EINTR"], 10),
]

def start_rank(program, transport, rank, port, prefix):
    env = dict(os.environ, DDL_TRANSPORTS=transport, DDL_PLUGIN_PATH=str(BUILD), RANK=str(rank), WORLD_SIZE="2",
               LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
               DDL_SECRET="0123456789abcdef0123456789abcdef", DDL_TIMEOUT_MS=str(int(4000 * SLOW)),
               DDL_INIT_TIMEOUT_MS=str(int(4000 * SLOW)), DDL_LOG="none")
    return subprocess.Popen(prefix + [str(program), "12"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True, errors="replace", start_new_session=True)


@functools.cache
def calls_of_the_loader(program, call):
    """What is called before main is not ours: glibc's loader crashes when its first mmap fails. (Each thread's calls are
    counted by themselves: those of others are reached later.)"""
    if call not in ("mmap", "openat"):
        return 0
    with tempfile.NamedTemporaryFile(prefix="ddl-test-") as calls:
        subprocess.run(["strace", "-qq", "-E", "LD_TRACE_LOADED_OBJECTS=1", "-o", calls.name, "-e", f"trace={call}", program],
                       stdout=subprocess.DEVNULL, check=True)
        return calls.read().count(call.encode() + b"(")


def life(program, transport, call, error, n, victim):
    """Runs a job; n 0: nothing fails. Returns whether the call was made, and what is wrong, or None."""
    port, start, bad = free_port(), time.monotonic(), []
    calls = tempfile.NamedTemporaryFile(prefix="ddl-test-")
    when = n + calls_of_the_loader(program, call) if n else 0
    inject = ["strace", "-f", "-qq", "-o", calls.name, "-e", f"trace={call}",
              "-e", f"inject={call}:error={error}:when={when}"]
    ranks = [start_rank(program, transport, r, port, inject if r == victim and n else []) for r in range(2)]
    for rank, child in enumerate(ranks):
        try:
            _, text = child.communicate(timeout=max(0.1, LIMIT_S - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            bad.append(f"rank {rank} hung")
            continue
        if child.returncode not in ((0, 10) if n else (0,)):
            bad.append(f"rank {rank} ended with {child.returncode}: {text.strip()[-500:]}")
        elif child.returncode == 10 and "DDL_ERR_INTERNAL" in text:
            bad.append(f"rank {rank}: {text.strip()[-500:]}")
    reached = b"(INJECTED)" in calls.read()
    if "FAULT_SHOW" in os.environ:
        print(f"  {time.monotonic() - start:.1f} s {call}={error}, call {n} of rank {victim}: "
              f"{[r.returncode for r in ranks]}{'' if reached else ', not reached'}", flush=True)
    return reached, f"{call}={error}, call {n} of rank {victim}: {'; '.join(bad)}" if bad else None


def every_failure_is_a_status_or_nothing(transport, calls):
    if not shutil.which("strace"):
        skip("strace is not installed (make deps)")
    if subprocess.run("strace -qq -o /dev/null true".split(), stderr=subprocess.DEVNULL).returncode != 0:
        skip("strace may not trace here (ptrace is forbidden)")
    seed = int(os.environ.get("TEST_SEED", int(time.time() * 1000) % 1000000))
    print(f"system calls over {transport}: TEST_SEED={seed}", flush=True)
    pick = random.Random(seed)
    cases = [(c, e, n, v) for c, errors, most in calls for e in errors for v in range(2)
             for n in [*range(1, min(most, DEEP) + 1),
                       *pick.sample(range(DEEP + 1, most + 1), min(DEEP, max(0, most - DEEP)))]]
    if "TEST_TORTURE" not in os.environ:  # each call once, and some more
        one_each = [pick.choice([x for x in cases if x[0] == c]) for c, _, _ in calls]
        cases = one_each + pick.sample(cases, int(os.environ.get("FAULT_RUNS", 12)))
    program = fault_rank()
    check(life(program, transport, "none", "none", 0, 0)[1] is None, f"the job fails by itself over {transport}")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda case: life(program, transport, *case), cases))
    reached, wrong = sum(r for r, _ in outcomes), [w for _, w in outcomes if w]
    print(f"  {reached} calls failed, of {len(cases)} that were to", flush=True)
    check(not wrong, "\n".join(wrong))
    check(reached >= len(cases) / 4, f"of {len(cases)} calls only {reached} were made: the lists do not fit this machine")


@test
def a_failing_system_call_is_a_status_or_nothing():
    every_failure_is_a_status_or_nothing("tcp", TCP)


@test
def so_it_is_over_libfabric():
    if not (BUILD / "libddl-fabric.so").exists():
        skip("libddl-fabric.so is not built; make plugins builds it where libfabric-dev is installed")
    every_failure_is_a_status_or_nothing("fabric:tcp", FABRIC)


if __name__ == "__main__":
    main()

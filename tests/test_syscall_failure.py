#!/usr/bin/env python3
"""The n-th call of each system call fails, once, in one rank of a running job (strace -e inject). Every rank then ends by
itself: with success, or with a status and a sentence; never by a signal, never with wrong bits, never hanging.

TEST_TORTURE=1 tries every call and error with n up to 12; else a sample drawn by TEST_SEED.
tests/run: waits=yes """
import concurrent.futures
import os
import random
import shutil
import signal
import subprocess
import time

from faults import fault_rank
from harness import check, main, skip, test
from jobs import free_port

SLOW = float(os.environ.get("TEST_SLOW", 1))
LIMIT_S = 25 * SLOW
AT_ONCE = 4  # most of a failing job is waiting for a deadline

# Call, errors, how often a rank makes it at most that is worth trying.
CALLS = [
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


def start_rank(program, rank, port, prefix):
    env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
               MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DDL_SECRET="0123456789abcdef0123456789abcdef",
               DDL_TIMEOUT_MS=str(int(4000 * SLOW)), DDL_INIT_TIMEOUT_MS=str(int(4000 * SLOW)), DDL_LOG="none")
    return subprocess.Popen(prefix + [str(program), "12"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True, errors="replace", start_new_session=True)


def life(program, call, error, n, victim):
    """Runs a job; returns what is wrong with it, or None."""
    port, start, bad = free_port(), time.monotonic(), []
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={n}"]
    ranks = [start_rank(program, r, port, inject if r == victim else []) for r in range(2)]
    for rank, child in enumerate(ranks):
        try:
            _, text = child.communicate(timeout=max(0.1, LIMIT_S - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            bad.append(f"rank {rank} hung")
            continue
        if child.returncode not in (0, 10):
            bad.append(f"rank {rank} ended with {child.returncode}: {text.strip()[-500:]}")
        elif child.returncode == 10 and "DDL_ERR_INTERNAL" in text:
            bad.append(f"rank {rank}: {text.strip()[-500:]}")
    if "FAULT_SHOW" in os.environ:
        print(f"  {time.monotonic() - start:.1f} s {call}={error}, call {n} of rank {victim}: "
              f"{[r.returncode for r in ranks]}", flush=True)
    return f"{call}={error}, call {n} of rank {victim}: {'; '.join(bad)}" if bad else None


@test
def a_failing_system_call_is_a_status_or_nothing():
    if not shutil.which("strace"):
        skip("strace is not installed (make deps)")
    if subprocess.run("strace -qq -o /dev/null true".split(), stderr=subprocess.DEVNULL).returncode != 0:
        skip("strace may not trace here (ptrace is forbidden)")
    seed = int(os.environ.get("TEST_SEED", int(time.time() * 1000) % 1000000))
    print(f"system calls: TEST_SEED={seed}", flush=True)
    pick, torture = random.Random(seed), "TEST_TORTURE" in os.environ
    cases = [(c, e, n, v) for c, errors, most in CALLS for e in errors for n in range(1, most + 1) for v in range(2)]
    if not torture:  # each call once, and some more
        one_each = [pick.choice([x for x in cases if x[0] == c]) for c, _, _ in CALLS]
        cases = one_each + pick.sample(cases, int(os.environ.get("FAULT_RUNS", 12)))
    program = fault_rank()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [w for w in pool.map(lambda case: life(program, *case), cases) if w]
    print(f"  {len(cases)} injections", flush=True)
    check(not wrong, "\n".join(wrong))


if __name__ == "__main__":
    main()

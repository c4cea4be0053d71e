#!/usr/bin/env python3
"""Shared memory where ranks share less than usual: a /dev/shm of 64 KiB or none that can be written, one of its own for
each rank, process numbers of its own for each rank, a limit of memory, as containers have. And what it takes.
tests/run: timeout=240 alone=yes"""
import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import time

from faults import fault_rank
from harness import BUILD, check, main, sh, skip, test
from jobs import free_port

SLOW = float(os.environ.get("TEST_SLOW", 1))
SECRET = "0123456789abcdef0123456789abcdef"


def unshare(*kinds):
    """The words before a command that give it namespaces of its own, as root or as a user who may have them."""
    for words in (["unshare", *kinds], ["unshare", "-r", *kinds]):
        if sh(words, "true").returncode == 0:
            return words
    skip(f"no namespaces here: unshare {' '.join(kinds)} fails")


class Ranks:
    """Ranks that each begin with a script of their own, before the program."""

    def __init__(self, count, words, before=lambda rank: "", rounds=12, **env):
        if not (BUILD / "libddl-shm.so").exists():
            skip("libddl-shm.so is not built; make plugins builds it")
        port, program = free_port(), fault_rank()
        base = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "DDL_SECRET": SECRET, "DDL_TRANSPORTS": "shm", "DDL_PLUGIN_PATH": str(BUILD),
                "DDL_TIMEOUT_MS": str(int(15000 * SLOW)), "DDL_INIT_TIMEOUT_MS": str(int(15000 * SLOW))}
        self.ranks = []
        for rank in range(count):
            one = {**os.environ, **base, "RANK": str(rank), "LOCAL_RANK": str(rank), **env}
            script = (before(rank) or "exec ") + f"{program} {rounds}"
            self.ranks.append(subprocess.Popen([*words, "sh", "-c", script], env=one, text=True, errors="replace",
                                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))

    def finish(self, seconds=40):
        """(exit status, what it printed) of each."""
        ended, limit = [], time.monotonic() + seconds * SLOW
        for rank in self.ranks:
            try:
                out, err = rank.communicate(timeout=max(0.1, limit - time.monotonic()))
                ended.append((rank.returncode, out + err))
            except subprocess.TimeoutExpired:
                self.kill()
                check(False, "the job hangs")
        return ended

    def until_running(self):
        """Of ranks that run until they are killed."""
        for rank in self.ranks:
            ready = select.select([rank.stdout], [], [], 20 * SLOW)[0]
            if not ready or rank.stdout.readline() != "running\n":
                self.kill()
                check(False, "a rank did not begin")

    def kill(self):
        for rank in self.ranks:
            try:
                os.killpg(rank.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            rank.communicate()

    def succeed(self):
        for rank, (status, text) in enumerate(self.finish()):
            check(status == 0, f"rank {rank} ended with {status}:\n{text[-2000:]}")


@test
def a_shared_folder_of_64_KiB_that_nobody_else_sees():
    Ranks(4, unshare("-m"), lambda rank: "mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77;").succeed()


@test
def a_shared_folder_that_cannot_be_written():
    Ranks(4, unshare("-m"), lambda rank: "mount -t tmpfs -o ro tmpfs /dev/shm || exit 77;").succeed()


def counting(rank):
    """So many processes before the rank that its number is another one than its neighbours'."""
    return "".join("/bin/true; " for _ in range(3 * rank))


@test
def process_numbers_of_their_own():
    for transport in ("shm", "tcp"):
        Ranks(4, unshare("-p", "-f", "-m", "--mount-proc"), counting, DDL_TRANSPORTS=transport).succeed()


@test
def a_death_is_seen_where_numbers_differ():
    for transport in ("shm", "tcp"):
        # Each says which of its processes is the rank, by the number that we see.
        ranks = Ranks(3, unshare("-p", "-f", "-m", "--mount-proc"), counting, rounds=-1, DDL_TRANSPORTS=transport)
        ranks.until_running()
        name = fault_rank().name[:15]
        in_session = [int(line.split()[0]) for line in sh("ps -eo pid=,sess=,comm=").stdout.splitlines()
                      if line.split()[1] == str(ranks.ranks[1].pid) and line.split()[2] == name]
        check(len(in_session) == 1, f"processes of rank 1: {in_session}")
        os.kill(in_session[0], signal.SIGKILL)
        killed = time.monotonic()
        for rank, (status, text) in enumerate(ranks.finish()):
            if rank != 1:
                check(status == 10 and re.search(r"rank 1 \(pid \d+ on host \S+\) is dead: its process ended", text),
                      f"rank {rank} over {transport} ended with {status}:\n{text[-1500:]}")
        took = time.monotonic() - killed
        check(took < 2 * SLOW, f"over {transport} it took {took:.1f} s")


@contextlib.contextmanager
def limited_group(megabytes):
    """The folder of a control group with a limit of memory, as a container has one."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = pathlib.Path(root, f"ddl-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(megabytes << 20))
                yield folder
                return
        except PermissionError:
            pass
        finally:
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except OSError:  # the last process is still on its way out
                    time.sleep(0.1)
    skip("no control group with a limit of memory can be made here (root, and a writable /sys/fs/cgroup)")


@test
def a_limit_of_memory_is_no_death():
    """What the segment could take is more than the container allows: taking it would be the end by SIGKILL."""
    with limited_group(160) as group:
        def join(rank):
            return f"echo $$ > {group}/cgroup.procs; exec "
        large = {"DDL_SHM_STAGING_BYTES": "128M"}
        for named in ("shm", ""):
            ended = Ranks(2, [], join, DDL_TRANSPORTS=named, **large).finish()
            check(all(0 < status < 128 if named else status == 0 for status, _ in ended), f"{named} ended with {ended}")
            check(any("the control group" in text and "raise its memory limit" in text for _, text in ended),
                  f"nobody names the limit: {ended}")
        Ranks(2, [], join).succeed()


def segment_bytes(pids):
    """Memory of the segment that these processes share: what is allocated of it, not its size."""
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            if os.readlink(path).startswith("/memfd:ddl-shm"):
                return os.stat(path).st_blocks * 512
    check(False, f"none of {pids} has a segment")


@test
def memory_is_what_was_promised():
    """Of ranks that have reduced, and sent large messages. Two ranks have longer rings, and not more memory."""
    window = (256 << 10) + 4096  # of a sender that helps: part of the 4 MiB, beside what is set by hand
    small = {"DDL_SHM_STAGING_BYTES": "256K", "DDL_SHM_RING_BYTES": "16K"}
    for ranks, staging, ring, env in ((4, 4 << 20, 64 << 10, {}), (2, 4 << 20, 64 << 10, {}),
                                      (4, (256 << 10) + window, 16 << 10, small), (2, (256 << 10) + window, 16 << 10, small)):
        tensors = 2 * ranks * (50000 * 4 + 4096)  # of fault_rank
        job = Ranks(ranks, [], rounds=-1, **env)
        job.until_running()
        time.sleep(0.3)
        used = segment_bytes(rank.pid for rank in job.ranks)
        job.kill()
        bound = ranks * (staging + (ranks - 1) * ring + 2 * 4096) + tensors
        print(f"     {ranks} ranks, staging {staging >> 10} KiB, rings {ring >> 10} KiB: {used >> 10} KiB of {bound >> 10} are used")
        check(tensors / 2 < used <= bound, f"{used} bytes are used; {bound} are promised")


if __name__ == "__main__":
    main()

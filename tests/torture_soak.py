"""A soak: eight ranks on two hosts sum without end, while a nemesis stops ranks, cuts the cable for a moment in one
direction or in both, and makes it slow. Every sum must be right, nobody may be taken for dead, and no more memory (2 MiB)
and files (two for each other rank) may be in use than a third into it. Each life of the job ends with a rank that is killed:
all others name it, shrink and go on; then the next life begins. Over each transport, SOAK_S seconds (600); TEST_SEED
repeats the choices.
tests/run: timeout=3600 alone=yes """
import os
import pathlib
import random
import signal
import time

from harness import BUILD, main, skip, test
from jobs import Job, check_causes, drop_rule, program, two_hosts

SOAK_S = float(os.environ.get("SOAK_S", 600))
LIVES = 5  # of the job, in SOAK_S
LAYOUT = "AAAABBBB"
SUMS = [100, 3000, 40000, 600000]  # floats


def size_of(process):
    """(resident KiB, open files) of a rank."""
    folder = pathlib.Path("/proc", str(process.pid))
    resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(resident.split()[1]), len(os.listdir(folder / "fd"))


class Nemesis:
    """What it does is over before it returns, and shorter than what the limits call a death. The kernel sends what was
    lost in a cut again after twice the time each try, so that cuts need some seconds between them."""

    def __init__(self, hosts, job, pick):
        self.hosts, self.job, self.pick, self.done = hosts, job, pick, []

    def pause(self, least, most):
        seconds = self.pick.uniform(least, most)
        time.sleep(seconds)
        self.done[-1] += f" {seconds:.2f}"

    def stop_some(self):
        victims = self.pick.sample(range(len(LAYOUT)), self.pick.choice([1, 1, 2, 4]))
        for rank in victims:
            self.job.signal(rank, signal.SIGSTOP)
        self.pause(0.05, 3)
        for rank in victims:
            self.job.signal(rank, signal.SIGCONT)

    def cut(self):
        self.hosts.link("down")
        self.pause(0.05, 1.8)
        self.hosts.link("up")

    def cut_one_way(self):
        side = self.pick.choice("AB")
        drop_rule(self.hosts, side, "drop", f"iifname {self.hosts.device[side]}")
        self.pause(0.05, 1.8)
        self.hosts.run(side, "nft delete table inet ddl")

    def slow(self):
        self.hosts.shape(f"tbf rate {self.pick.choice([20, 200])}mbit burst 32k latency 300ms")
        self.pause(0.5, 4)
        for side in "AB":
            self.hosts.run(side, f"tc qdisc del dev {self.hosts.device[side]} root")

    def strike(self):
        name = self.pick.choice(["stop_some", "stop_some", "cut", "cut_one_way", "slow"])
        self.done.append(name)
        getattr(self, name)()
        self.pause(2.5 if name.startswith("cut") else 0.2, 4)


def live(hosts, transport, seconds, pick):
    """One life of the job: what was done to it, and by how much it has grown."""
    words = f"loop {pick.choice(SUMS)} 86400 {pick.choice([0, 1])}"
    env = {"DDL_TRANSPORTS": transport, "DDL_PLUGIN_PATH": BUILD, "DDL_TIMEOUT_MS": 60000}
    with Job(program(), words, hosts=hosts, layout=LAYOUT, **env) as job:
        job.until("looping")
        nemesis, start, early = Nemesis(hosts, job, pick), time.monotonic(), None
        while time.monotonic() - start < seconds:
            nemesis.strike()
            for rank, process in job.process.items():
                there = process.poll() is None and not job.lines(rank, "error")
                job.check(there, f"rank {rank} has ended: {nemesis.done}")
            if early is None and time.monotonic() - start > seconds / 3:
                early = [size_of(p) for p in job.process.values()]
        text = job.everything()
        job.check("is dead" not in text and "is cut off" not in text, "somebody was taken for dead")
        late = [size_of(p) for p in job.process.values()]
        grown = max(b - a for (a, _), (b, _) in zip(early, late))
        job.check(grown <= 2048, f"resident KiB and open files, a third into it and at its end: {early}, {late}")
        opened = max(b - a for (_, a), (_, b) in zip(early, late))  # ranks may connect that had not talked before
        job.check(opened <= 2 * (len(LAYOUT) - 1), f"open files: {early}, {late}")
        victim = pick.randrange(len(LAYOUT))
        time.sleep(2)
        since = time.monotonic()
        job.signal(victim, signal.SIGKILL)
        others = [r for r in range(len(LAYOUT)) if r != victim]
        job.finish(60)
        check_causes(job, others, [victim], since, 1)
        job.check(all(job.lines(r, "survived") for r in others), "not all others went on")
    counts = ", ".join(f"{sum(d.startswith(n) for d in nemesis.done)} {n}" for n in ("stop_some", "cut", "slow"))
    print(f"     {words}: {counts}; grown by {grown} KiB of {late[0][0]}", flush=True)


def soak(transport):
    plugin = transport.partition(":")[0]
    if plugin != "tcp" and not (BUILD / f"libddl-{plugin.partition(',')[0]}.so").exists():
        skip(f"the plugin of {transport} is not built (make plugins)")
    seed = int(os.environ.get("TEST_SEED", time.time() * 1000 % 1000000))
    print(f"soak over {transport}: TEST_SEED={seed}", flush=True)
    pick = random.Random(seed)
    with two_hosts() as hosts:
        for _ in range(LIVES):
            live(hosts, transport, SOAK_S / LIVES, pick)


@test
def over_tcp():
    soak("tcp")


@test
def over_libfabric():
    soak("fabric:tcp")


@test
def over_shared_memory_and_tcp():
    soak("shm,tcp")


main()

"""Jobs of several processes for tests in Python: their environment, their output, and hosts made of namespaces.

    job = Job(program(), "loop 1000 5 0", ranks=4, MASTER_ADDR="127.0.0.1")
    job.until("looping"); job.kill(2); job.finish(); job.lines(0, "error")

    with two_hosts() as hosts:             skips where it cannot be (not root, no `ip`)
        job = Job(program(), "correct", hosts=hosts, layout="AABB")

    in_machine("two-hosts", "both", program, files=[program])     an emulated machine with RDMA devices

Every job is killed at the end, whatever happens: use `with`. Its output is shown when a check fails."""
import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from harness import BUILD, ROOT, check, good, sh, skip

VM = ROOT / "tests" / "vm"
SECRET = "a secret that only tests have"
SLOW = float(os.environ.get("TEST_SLOW", 1))


def within(seconds):
    """A limit for a promise in seconds, with room for a machine that others use too."""
    return (seconds + 0.4 * os.getloadavg()[0]) * SLOW


def program():
    """two_hosts_rank, built once."""
    target = BUILD / "tests" / "two_hosts_rank"
    library = BUILD / "libddl.a"
    good("make -s", f"B={BUILD}", library, timeout=300)
    source = ROOT / "tests" / "two_hosts_rank.c"
    if not target.exists() or target.stat().st_mtime < max(f.stat().st_mtime for f in (source, library)):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = f"{target}.{os.getpid()}.tmp"  # another test may make it at the same time
        good("gcc -std=c11 -Wall -Wextra -Werror -g", f"-I{ROOT}", "-o", made, source, library, "-lpthread -ldl")
        os.replace(made, target)
    return target


def in_machine(net, *command, netem="", files=(), seconds=110, megabytes=1024, partly=False, **env):
    """What a command prints in the emulated machine of tests/vm; partly: also where the time is over before its end. Skips where that cannot
    be booted."""
    for needed in ("qemu-system-x86_64", "busybox", "cpio", "dpkg-query"):
        if not shutil.which(needed):
            skip(f"{needed} is not installed (make deps)")
    env = {"DDL_SECRET": SECRET, "DDL_LOG": "info", "DDL_INIT_TIMEOUT_MS": 60000, **env}
    words = [VM / "rdma-vm", "--net", net, "--timeout", int(seconds * SLOW), "--mem", megabytes]
    words += ["--netem", netem] if netem else []
    for name, value in env.items():
        words += ["--env", f"{name}={value}"]
    done = sh([*words, "--file", *files, "--", *command], timeout=(seconds + 120) * SLOW)
    missing = re.search(r"rdma-vm: (missing packages.*|could not download.*|no linux-image.*)", done.stdout)
    if done.returncode == 125 and missing:
        skip(missing[1])
    check(done.returncode == 0 or (partly and done.returncode == 124), f"ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def free_port():
    """Free on 127.0.0.1 now, and below the ephemeral ports, so that no connection takes it meanwhile. tests/run gives
    programs that it runs at once different ports (TEST_PORTS)."""
    first = int(os.environ.get("TEST_PORTS", 20000))
    while True:
        port = random.randrange(first, first + 3000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Job:
    """Ranks of one job. `env` goes to all; `each` is {rank: {name: value or None}}. `layout`: a letter per rank, its
    host. `only`: start just these ranks."""

    def __init__(self, command, *words, ranks=4, hosts=None, layout=None, each=None, only=None, **env):
        self.words = [str(command)] + [w for text in words for w in str(text).split()]
        self.hosts, self.layout = hosts, layout
        self.size = len(layout) if layout else ranks
        self.each = each or {}
        self.env = {"DDL_SECRET": SECRET, "DDL_LOG": "info", "DDL_INIT_TIMEOUT_MS": int(30000 * SLOW),
                    "MASTER_ADDR": hosts.address["A"] if hosts else "127.0.0.1", "MASTER_PORT": free_port()}
        self.env.update(env)
        self.folder = tempfile.TemporaryDirectory(prefix="ddl-test-")
        self.process = {}
        for rank in range(self.size) if only is None else only:
            self.start(rank)

    def start(self, rank):
        env = {k: v for k, v in os.environ.items() if not re.match(r"DDL_|RANK$|WORLD_SIZE$|LOCAL_|MASTER_", k)}
        local = [r for r in range(self.size) if not self.layout or self.layout[r] == self.layout[rank]]
        env.update(RANK=rank, WORLD_SIZE=self.size, LOCAL_RANK=local.index(rank), LOCAL_WORLD_SIZE=len(local))
        env.update(self.env)
        env.update(self.each.get(rank, {}))
        env = {k: str(v) for k, v in env.items() if v is not None}
        prefix = self.hosts.into(self.layout[rank]) if self.hosts else []
        with open(self.file(rank), "w") as log:
            self.process[rank] = subprocess.Popen(prefix + self.words, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                                  stderr=subprocess.STDOUT)

    def file(self, rank):
        return pathlib.Path(self.folder.name, str(rank))

    def output(self, rank):
        return self.file(rank).read_text(errors="replace")

    def everything(self):
        return "\n".join(f"--- rank {r} ---\n{self.output(r)}" for r in self.process)

    def check(self, condition, text):
        check(condition, f"{text}\n{self.everything()[-6000:]}" if not condition else "")

    def lines(self, rank, word):
        """The rest of each line of that rank that begins with word."""
        return [line[len(word) + 1:] for line in self.output(rank).splitlines() if line.startswith(word + " ")
                or line == word]

    def until(self, word, ranks=None, seconds=40):
        end = time.monotonic() + seconds * SLOW
        for rank in ranks if ranks is not None else self.process:
            while not self.lines(rank, word):
                self.check(time.monotonic() < end, f"rank {rank} did not say {word!r} within {seconds} s")
                self.check(self.process[rank].poll() is None or self.lines(rank, word), f"rank {rank} ended early")
                time.sleep(0.01)

    def signal(self, rank, number):
        os.kill(self.process[rank].pid, number)

    def finish(self, seconds=60, ranks=None):
        """Waits for the ranks. Returns {rank: exit status}."""
        end = time.monotonic() + seconds * SLOW
        for rank in ranks if ranks is not None else self.process:
            try:
                self.process[rank].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.check(False, f"rank {rank} did not end within {seconds} s")
        return {r: p.returncode for r, p in self.process.items()}

    def succeed(self, seconds=60):
        codes = self.finish(seconds)
        self.check(all(c == 0 for c in codes.values()), f"exit statuses {codes}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in self.process.values():
            if p.poll() is None:
                p.kill()
            p.wait()
        self.folder.cleanup()


# ------------------------------------------------------------------------------------------------ hosts


class Hosts:
    """Two network namespaces, A and B, with a cable between them: 10.78.0.1 and 10.78.0.2. A second address on each
    side, .11 and .12, is for proxies."""

    address = {"A": "10.78.0.1", "B": "10.78.0.2"}
    proxy = {"A": "10.78.0.11", "B": "10.78.0.12"}
    device = {"A": "ddla", "B": "ddlb"}

    def __init__(self):
        self.name = {side: f"ddl{os.getpid()}{side}" for side in "AB"}

    def make(self):
        self.sweep()
        for side in "AB":
            good("ip netns add", self.name[side])
        good(f"ip -n {self.name['A']} link add ddla type veth peer name ddlb netns {self.name['B']}")
        for side in "AB":
            for address in (self.address[side], self.proxy[side]):
                good(f"ip -n {self.name[side]} addr add {address}/24 dev {self.device[side]}")
            good(f"ip -n {self.name[side]} link set lo up")
            good(f"ip -n {self.name[side]} link set {self.device[side]} up")
        self.wait_for_carrier()

    def wait_for_carrier(self):
        """The kernel tells up to a second late, and libfabric takes no interface that it says is down."""
        end = time.monotonic() + 3
        while time.monotonic() < end and any(self.run(side, f"cat /sys/class/net/{self.device[side]}/operstate") != "up\n"
                                             for side in "AB"):
            time.sleep(0.05)

    def remove(self):
        for side in "AB":
            sh("ip netns del", self.name[side])
            shutil.rmtree(f"/etc/netns/{self.name[side]}", ignore_errors=True)

    @staticmethod
    def sweep():
        """What a test that was killed has left behind."""
        for path in pathlib.Path("/run/netns").glob("ddl*"):
            owner = re.fullmatch(r"ddl(\d+)[AB]", path.name)
            if owner and not pathlib.Path("/proc", owner[1]).exists():
                sh("ip netns del", path.name)
                shutil.rmtree(f"/etc/netns/{path.name}", ignore_errors=True)

    def into(self, side):
        return ["ip", "netns", "exec", self.name[side]]

    def run(self, side, command, **options):
        return good(self.into(side), command, **options)

    def link(self, state, side="A"):
        good(f"ip -n {self.name[side]} link set {self.device[side]} {state}")

    def shape(self, words):
        """Both ways through the cable, in the words of tc."""
        for side in "AB":
            shaped = sh(self.into(side), f"tc qdisc add dev {self.device[side]} root {words}")
            if shaped.returncode:
                skip(f"tc cannot do {words} here: {shaped.stdout.strip()[:100]}")

    @contextlib.contextmanager
    def spread(self, **env):
        """The environment in which a test program spreads its forked ranks over both sides (ranks.h)."""
        stand_ins = [subprocess.Popen(self.into(side) + ["env", f"DDL_INTERFACE={self.device[side]}",
                                                         f"MASTER_ADDR={self.address['A']}", "sleep", "1000"])
                     for side in "AB"]
        try:
            for p in stand_ins:
                while b"DDL_INTERFACE" not in pathlib.Path("/proc", str(p.pid), "environ").read_bytes():
                    check(p.poll() is None, "a process that stands for a host has ended")
                    time.sleep(0.02)
            yield dict(os.environ, TEST_HOSTS=" ".join(str(p.pid) for p in stand_ins), **env)
        finally:
            for p in stand_ins:
                p.kill()
                p.wait()

    def names(self, side, text):
        """/etc/hosts of one side."""
        folder = pathlib.Path("/etc/netns", self.name[side])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(text)


@contextlib.contextmanager
def two_hosts():
    if os.geteuid() != 0:
        skip("needs root, to make network namespaces")
    if not shutil.which("ip"):
        skip("needs `ip` (iproute2; make deps)")
    hosts = Hosts()
    probe = sh("ip netns add", f"ddl{os.getpid()}A")
    if probe.returncode:
        skip(f"network namespaces cannot be made here: {probe.stdout.strip()[:200]}")
    sh("ip netns del", f"ddl{os.getpid()}A")
    before = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(1)))
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
        signal.signal(signal.SIGTERM, before)


def cut(hosts):
    time.sleep(0.5)
    hosts.link("down")
    return time.monotonic()


def drop_rule(hosts, side, verdict, match):
    """What comes in on one side and matches."""
    if not shutil.which("nft"):
        skip("needs nft (nftables; make deps)")
    rules = ("add table inet ddl; add chain inet ddl in { type filter hook input priority 0 ; }; "
             f"add rule inet ddl in {match} {verdict}")
    done = sh(hosts.into(side), ["nft", rules])
    if done.returncode:
        skip(f"nft does not work here: {done.stdout.strip()[:100]}")


# ---------------------------------------------------------------------------------------- who is said to be dead


def cause(text):
    """Of the sentence of a rank what the broken group says, without the call of the rank."""
    return re.sub(r" \(before it: .*$", "", re.sub(r"^.*? group \"\w+\": ", "", text))


def ranks_in(text):
    """The ranks that a sentence names: "rank 3", "ranks 0, 2-3"."""
    found = {int(n) for n in re.findall(r"\brank (\d+)", text)}
    for several in re.findall(r"\branks ((?:[\d-]+(?:, )?)+)", text):
        found |= {n for a, b in re.findall(r"(\d+)(?:-(\d+))?", several) for n in range(int(a), int(b or a) + 1)}
    return found


def causes(job, ranks):
    """The status and cause that each of the ranks reports: what the broken group says, without the calls of the rank."""
    found = {}
    for rank in ranks:
        lines = job.lines(rank, "error")
        job.check(lines, f"rank {rank} reports no error")
        at, status, text = re.fullmatch(r"(\S+) (\w+): (.*)", lines[0]).groups()
        found[rank] = (float(at), status, cause(text))
    return found


def check_causes(job, ranks, named, since, limit):
    """All of them report DDL_ERR_PEER in time, for one cause, and it names one or more of the ranks in `named`. The
    operation that failed may differ: who had all its parts was in the next one already."""
    found = causes(job, ranks)
    texts = {re.sub(r'^.*? of group "world"( \(before it: .*?\))?: ', "", text) for _, _, text in found.values()}
    job.check({status for _, status, _ in found.values()} == {"DDL_ERR_PEER"}, f"not all say DDL_ERR_PEER: {found}")
    job.check(len(texts) == 1, f"ranks {ranks} report different causes: {texts}")
    text = texts.pop()
    mentioned = ranks_in(text)
    job.check(mentioned and mentioned <= set(named), f"the cause names {mentioned}, not of {named}: {text}")
    slowest = max(at for at, _, _ in found.values()) - since
    job.check(slowest < within(limit), f"the last of {ranks} reported after {slowest:.1f} s, {limit} s are promised")
    print(f"     ranks {ranks} after {slowest:.2f} s: {text}")
    return text

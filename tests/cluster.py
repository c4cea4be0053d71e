"""Launchers of clusters for tests: Slurm of one's own, and both mpiruns, on this machine or on two hosts made of
namespaces.

    with slurm() as cluster: cluster.srun("--mpi=pmi2 -N 2 -n 4", program, "correct")
    with two_hosts() as hosts, slurm(hosts) as cluster: ...     a node on each side

Skips, with the reason, where a package is not installed or this is not root."""
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

from harness import check, scratch, sh, skip
from jobs import SLOW, free_port

CONFIG = """ClusterName=ddl
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TmpFS={folder}/spool-%n
SelectType=select/cons_res
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=2
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr={address} Port={ports[1]} CPUs=16 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={other} Port={ports[2]} CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def plain_env(**env):
    """This environment without what says which rank of which job one is."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(("DDL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI", "OMPI_", "SLURM_"))}
    kept.update({k: str(v) for k, v in env.items()})
    return kept


def need(*programs):
    for program in programs:
        if not shutil.which(program):
            skip(f"{program} is not installed (make deps)")
    if os.geteuid() != 0:
        skip("needs root")


class Slurm:
    """A controller and two nodes, n1 and n2; with hosts on a side each, else both here."""

    def __init__(self, folder, hosts):
        self.folder, self.hosts = folder, hosts
        self.processes = []
        self.env = plain_env(SLURM_CONF=f"{folder}/slurm.conf", DDL_LOG="info")

    def start(self):
        host = socket.gethostname().split(".")[0]
        address = self.hosts.address if self.hosts else {"A": "127.0.0.1", "B": "127.0.0.1"}
        key = pathlib.Path(self.folder, "munge.key")
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        pathlib.Path(self.folder).chmod(0o755)  # munged asks for it
        for name in ("state", "spool-n1", "spool-n2"):
            pathlib.Path(self.folder, name).mkdir()
        pathlib.Path(self.folder, "slurm.conf").write_text(CONFIG.format(
            host=host, folder=self.folder, address=address["A"], other=address["B"], ports=[free_port() for _ in range(3)]))
        if self.hosts:
            for side in "AB":
                self.hosts.names(side, f"127.0.0.1 localhost\n{address['A']} {host} n1\n{address['B']} n2\n")
        f = self.folder
        self.daemon("munge", "A", "munged", "--foreground", "--force", f"--socket={f}/munge.socket", f"--key-file={key}",
                    f"--pid-file={f}/munge.pid", f"--log-file={f}/munged.log", f"--seed-file={f}/munge.seed")
        self.until(lambda: pathlib.Path(f, "munge.socket").exists(), "munged gives no socket")
        self.daemon("slurmctld", "A", "slurmctld", "-D", "-c")
        self.daemon("n1", "A", "slurmd", "-D", "-N", "n1")
        self.daemon("n2", "B", "slurmd", "-D", "-N", "n2")
        self.until(lambda: self.run("A", "sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle", "idle"],
                   "the nodes do not come up")

    def into(self, side):
        """`ip netns exec` would give a fresh /sys, where slurmd misses its cgroups."""
        if not self.hosts:
            return []
        name = self.hosts.name[side]
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "sh", "-c",
                f"mount --bind /etc/netns/{name}/hosts /etc/hosts; exec \"$@\"", "sh"]

    def run(self, side, *words, timeout=60, **env):
        return sh(self.into(side), list(words), env=dict(self.env, **env), timeout=timeout * SLOW)

    def srun(self, words, *command, **env):
        """What it prints; it must succeed."""
        done = self.run("A", "srun", *words.split(), *[w for c in command for w in str(c).split()], **env)
        check(done.returncode == 0, f"srun {words} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{self.logs()}")
        return done.stdout

    def daemon(self, name, side, *words):
        with open(f"{self.folder}/{name}.log", "w") as log:
            self.processes.append(subprocess.Popen(self.into(side) + list(words), env=self.env, stdin=subprocess.DEVNULL,
                                                   stdout=log, stderr=subprocess.STDOUT))

    def until(self, true, text):
        end = time.monotonic() + 30 * SLOW
        while not true():
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                skip(f"Slurm does not start here: {text}: {self.logs()[-600:]}")
            time.sleep(0.1)

    def logs(self):
        return "".join(f"{p.name}: {p.read_text(errors='replace')[-700:]}\n"
                       for p in sorted(pathlib.Path(self.folder).glob("*.log")))

    def stop(self):
        for p in reversed(self.processes):
            p.terminate()
            try:
                p.wait(10 * SLOW)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


@contextlib.contextmanager
def slurm(hosts=None):
    need("munged", "slurmctld", "slurmd", "srun")
    with scratch() as folder:
        cluster = Slurm(folder, hosts)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def mpirun(which, words, *command, hosts=None, timeout=60, **env):
    """What mpirun.openmpi or mpirun.mpich prints; it must succeed. With hosts: from side A, to the other side by a
    script that stands for ssh."""
    need(f"mpirun.{which}")
    with scratch() as folder:
        prefix, words = [f"mpirun.{which}"], words.split()
        if hosts:
            prefix = hosts.into("A") + prefix
            remote = pathlib.Path(folder, "remote")  # remote [options] HOST COMMAND...
            remote.write_text(f"#!{sys.executable}\nimport os, sys\nat = next(i for i, w in enumerate(sys.argv) if "
                              f"w in ('n1', 'n2'))\nside = {{'n1': {hosts.name['A']!r}, 'n2': {hosts.name['B']!r}}}"
                              "[sys.argv[at]]\nos.execvp('ip', ['ip', 'netns', 'exec', side, 'sh', '-c', "
                              "' '.join(sys.argv[at + 1:])])\n")
            remote.chmod(0o700)
            for side in "AB":
                hosts.names(side, f"127.0.0.1 localhost\n{hosts.address['A']} n1\n{hosts.address['B']} n2\n")
            words = (["--mca", "plm_rsh_agent", str(remote), "--mca", "oob_tcp_if_include", "10.78.0.0/24", "--host",
                      "n1:2,n2:2"] if which == "openmpi" else
                     ["-launcher", "rsh", "-launcher-exec", str(remote), "-hosts", "n1,n2", "-ppn", "2", "-localhost",
                      hosts.address["A"]]) + words
        env = plain_env(OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, DDL_LOG="info", **env)
        done = sh(prefix, words, [w for c in command for w in str(c).split()], env=env, timeout=timeout * SLOW)
        check(done.returncode == 0, f"mpirun.{which} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout

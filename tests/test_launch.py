"""How a job starts, and what is said when it does not: variables by hand as torchrun sets them, a folder instead of a
port, ranks that come late or never, two jobs at once, wrong names, numbers and secrets. In each case the sentence
names what is wrong, on every rank that can know.
tests/run: waits=yes timeout=240 """
import os
import pathlib
import re
import shutil
import socket
import tempfile
import time

from harness import BUILD, check, good, main, scratch, sh, skip, test
from jobs import SECRET, SLOW, Job, free_port, program, within

RANK = program()
SHORT = int(2500 * SLOW)


def failed(job, rank):
    """(status, sentence) of a rank that could not join; the same sentence went to its log."""
    lines = job.lines(rank, "failed")
    job.check(len(lines) == 1, f"rank {rank} did not fail at the start")
    status, text = lines[0].split(": ", 1)
    job.check(job.output(rank).count(text) == 2, f"the log of rank {rank} lacks the sentence")
    job.check(SECRET not in job.output(rank), f"rank {rank} tells the secret")
    return status, text


def refused(status, pattern, ranks=(0,), **env):
    """One rank with wrong variables fails at once, before it looks for others, and says what is wrong."""
    with Job(RANK, "init", only=list(ranks), **env) as job:
        start = time.monotonic()
        job.finish(20)
        for rank in ranks:
            got, text = failed(job, rank)
            job.check(got == status and re.search(pattern, text), f"not {status} with /{pattern}/")
        job.check(time.monotonic() - start < within(2), "it took too long")


# ------------------------------------------------------------------------------------------------ it works


@test
def variables_of_torchrun():
    with Job(RANK, "correct", GROUP_RANK=0, ROLE_RANK=0, TORCHELASTIC_RUN_ID="job-7") as job:
        job.succeed()
        job.check("4 ranks on 1 host" in job.output(0) and all("correct; " in job.output(r) for r in range(4)), "not all ran")


@test
def torchrun_itself():
    if not shutil.which("torchrun"):
        skip("torchrun is not installed (make deps)")
    env = dict(os.environ, DDL_SECRET=SECRET)
    with scratch() as folder:  # torch 1.13 fails on Python 3.11 when it is to redirect nothing, as is its default
        done = sh(["torchrun", "--nproc_per_node=4", f"--master_port={free_port()}", "--redirects=1", "--tee=1",
                   f"--log_dir={folder}", "--no_python", str(RANK), "correct"], env=env, timeout=120)
    check(done.returncode == 0 and done.stdout.count("correct; ") == 4, done.stdout[-3000:])


@test
def the_start_is_one_line():
    """At level info, of eight ranks with all plugins that are built. That a collective was slow, as on a machine that others
    keep busy, is told of by another line, here switched off."""
    plugins = sorted(BUILD.glob("libddl-*.so"))
    with Job(RANK, "correct", ranks=8, DDL_PLUGIN_PATH=BUILD, DDL_SLOW=0) as job:
        job.succeed()
        said = [line for r in range(8) for line in job.output(r).splitlines()
                if line.startswith("ddl:")]
        job.check(len(said) == 1 and "rank 0: 8 ranks on 1 host; " in said[0], f"with {len(plugins)} plugins: {said}")


@test
def folder_as_meeting_place():
    with scratch() as folder, Job(RANK, "correct", MASTER_ADDR=None, MASTER_PORT=None,
                                  DDL_RENDEZVOUS=f"file://{folder}") as job:
        job.succeed()
        check(not any(pathlib.Path(folder).rglob("*.secret")), "the folder holds a secret")
        check(SECRET.encode() not in b"".join(f.read_bytes() for f in pathlib.Path(folder).rglob("*") if f.is_file()),
              "the secret lies in the folder")


@test
def same_folder_again():
    with scratch() as folder:
        for _ in range(2):
            with Job(RANK, "loop 10 0.1 0", MASTER_ADDR=None, DDL_RENDEZVOUS=f"file://{folder}") as job:
                job.succeed()


@test
def no_secret_on_one_host():
    with Job(RANK, "correct", DDL_SECRET=None) as job:
        job.succeed()
        job.check("no job secret: same host and user only" in job.output(0), "the start does not say so")


@test
def rank_0_comes_late():
    with Job(RANK, "loop 10 0.1 0", only=[1, 2, 3]) as job:
        time.sleep(1.5)
        job.check(not any(job.lines(r, "failed") for r in (1, 2, 3)), "they did not wait for rank 0")
        job.start(0)
        job.succeed()


@test
def two_jobs_at_once():
    """Each with its own port and secret; and two with one port, told apart by their names, where no TCP is needed."""
    with Job(RANK, "correct") as one, Job(RANK, "correct", DDL_SECRET="another secret of some length") as two:
        one.succeed()
        two.succeed()
    port = free_port()
    with Job(RANK, "correct", DDL_SECRET=None, MASTER_PORT=port, DDL_JOB="one") as one, \
            Job(RANK, "correct", DDL_SECRET=None, MASTER_PORT=port, DDL_JOB="two") as two:
        one.succeed()
        two.succeed()


@test
def a_job_after_the_other_on_one_port():
    port = free_port()
    for _ in range(3):
        with Job(RANK, "loop 10 0.05 0", MASTER_PORT=port) as job:
            job.succeed()


@test
def killed_job_leaves_its_port_free():
    port = free_port()
    with Job(RANK, "loop 10 600 0", MASTER_PORT=port) as job:
        job.until("looping")
    with Job(RANK, "loop 10 0.05 0", MASTER_PORT=port) as job:
        job.succeed()


# ------------------------------------------------------------------------------------- somebody is missing


@test
def rank_that_never_comes_is_named_on_all():
    with Job(RANK, "init", only=[0, 1, 3], DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(20)
        for rank in (0, 1, 3):
            status, text = failed(job, rank)
            job.check(status == "DDL_ERR_TIMEOUT" and re.search(r"rank 2 of 4 has not come", text), f"rank {rank}")
        job.check(len({failed(job, r)[1] for r in (0, 1, 3)}) == 1, "not one sentence on all")


@test
def rank_0_never_comes():
    with Job(RANK, "init", only=[1, 2], DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(20)
        for rank in (1, 2):
            status, text = failed(job, rank)
            job.check(status == "DDL_ERR_TIMEOUT" and "could not reach rank 0" in text and "refused" in text,
                      f"rank {rank} does not say that nobody listens there")


@test
def missing_rank_with_a_folder():
    with scratch() as folder, Job(RANK, "init", only=[0, 1], ranks=3, MASTER_ADDR=None, DDL_INIT_TIMEOUT_MS=SHORT,
                                  DDL_RENDEZVOUS=f"file://{folder}") as job:
        job.finish(20)
        for rank in (0, 1):
            status, text = failed(job, rank)
            job.check(status == "DDL_ERR_TIMEOUT" and "rank 2" in text, f"rank {rank} does not name rank 2")


@test
def rank_that_dies_at_the_start_is_named():
    """Rank 3 has come and is killed while rank 2 is still awaited: nobody waits for the whole deadline."""
    with Job(RANK, "init", only=[0, 1, 3]) as job:
        time.sleep(0.7 * SLOW)
        since = time.monotonic()
        job.signal(3, 9)
        job.finish(20, ranks=[0, 1])
        for rank in (0, 1):
            status, text = failed(job, rank)
            job.check(status == "DDL_ERR_PEER" and "rank 3" in text, f"rank {rank} does not name rank 3")
        job.check(time.monotonic() - since < within(2), "it took too long")


# ------------------------------------------------------------------------------------ something is wrong


@test
def rank_that_ends_before_it_joins_is_named_under_ddlrun():
    """The others would wait a minute for it. What counts the ranks of a job otherwise than ddlrun is left alone."""
    good("make -s", f"B={BUILD}", BUILD / "ddlrun")
    for dead in (2, 0):
        start = time.monotonic()
        done = sh(BUILD / "ddlrun", "-n 3 --keep-going", "sh", "-c", [f"[ $RANK = {dead} ] && exit 7; exec {RANK} init"],
                  env=dict(os.environ, DDL_INIT_TIMEOUT_MS="60000"), timeout=100)
        named = re.findall(r"^\[(\d)\] failed DDL_ERR_PEER: ddl_init: the process of rank (\d) of 3 has ended", done.stdout, re.M)
        check(sorted(named) == [(str(r), str(dead)) for r in range(3) if r != dead], f"not both name it: {done.stdout}")
        check(time.monotonic() - start < within(20), f"it took {time.monotonic() - start:.1f} s")
    for text, pattern in (("seven", "DDL_ENDED_FD is \"seven\""), ("1000000", None)):
        done = sh(RANK, "init", env=dict(os.environ, DDL_ENDED_FD=text, RANK="0", WORLD_SIZE="1"), timeout=30)
        check((done.returncode == 0) == (pattern is None) and re.search(pattern or "done", done.stdout), done.stdout)


@test
def port_in_use_is_explained():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Job(RANK, "init", ranks=2, MASTER_PORT=port, DDL_INIT_TIMEOUT_MS=SHORT * 2) as job:
            job.finish(30)
            status, text = failed(job, 0)
            job.check(status == "DDL_ERR_CONFIG" and f"port {port}" in text and "is taken by process" in text and
                      f"{os.getpid()}" in text, "rank 0 does not say who has the port")


@test
def unresolvable_host_is_named():
    with Job(RANK, "init", ranks=2, MASTER_ADDR="no-such-host.invalid", DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(40)
        for rank in (0, 1):
            status, text = failed(job, rank)
            job.check(status == "DDL_ERR_CONFIG" and re.search(r"no-such-host\.invalid, cannot be resolved: [A-Z]", text),
                      f"rank {rank} does not say that there is no such name")
            job.check(job.output(rank).count("cannot be resolved") == 2, f"rank {rank} logs it more than once")


@test
def unresolvable_host_without_a_secret():
    with Job(RANK, "init", ranks=2, MASTER_ADDR="no-such-host.invalid", DDL_SECRET=None,
             DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(40)
        job.check(re.search(r"cannot find the address of no-such-host\.invalid .*: [A-Z]", failed(job, 0)[1]), "rank 0")
        job.check("no-such-host.invalid" in failed(job, 1)[1], "rank 1")


@test
def ranks_and_ports_out_of_range():
    refused("DDL_ERR_CONFIG", r"RANK is 9 and WORLD_SIZE is 4.*0 to 3", RANK=9)
    refused("DDL_ERR_CONFIG", r"RANK is 4 and WORLD_SIZE is 4", RANK=4, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None)
    refused("DDL_ERR_CONFIG", r"WORLD_SIZE is \"four\"", WORLD_SIZE="four")
    refused("DDL_ERR_CONFIG", r"RANK is \"-1\"", RANK=-1)
    refused("DDL_ERR_CONFIG", r"WORLD_SIZE is not set", WORLD_SIZE=None)
    refused("DDL_ERR_CONFIG", r"MASTER_PORT is \"70000\"", MASTER_PORT=70000)
    refused("DDL_ERR_CONFIG", r"MASTER_PORT is not set.*MASTER_ADDR", MASTER_PORT=None)
    refused("DDL_ERR_CONFIG", r"DDL_RENDEZVOUS is \"http://x\"", DDL_RENDEZVOUS="http://x")
    refused("DDL_ERR_CONFIG", r"port range is \"5-4\"", DDL_PORT_RANGE="5-4")
    refused("DDL_ERR_CONFIG", r"eth77", DDL_INTERFACE="eth77", DDL_INIT_TIMEOUT_MS=SHORT)


@test
def two_processes_with_one_rank():
    with Job(RANK, "init", only=[0, 1], each={1: {"RANK": 0}}, ranks=2, DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(30)
        job.check(any("is taken by process" in job.output(r) for r in (0, 1)), "nobody says that rank 0 is there twice")
    with Job(RANK, "init", only=[0, 1, 2], each={2: {"RANK": 1, "LOCAL_RANK": 1}}, ranks=3,
             DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(30)
        job.check(any("another process with the same rank" in failed(job, r)[1] for r in (1, 2)),
                  "nobody says that rank 1 is there twice")


@test
def other_world_size_is_told():
    with Job(RANK, "init", each={1: {"WORLD_SIZE": 3}}, ranks=2, DDL_INIT_TIMEOUT_MS=SHORT) as job:
        job.finish(30)
        job.check("WORLD_SIZE" in failed(job, 1)[1], "rank 1 does not say what differs")


@test
def secrets_that_are_none():
    with scratch() as folder:
        file = pathlib.Path(folder, "secret")

        def with_file(pattern, mode, text="a secret in a file, 32 bytes long"):
            file.write_text(text)
            file.chmod(mode)
            refused("DDL_ERR_CONFIG", pattern, DDL_SECRET=None, DDL_SECRET_FILE=file)

        refused("DDL_ERR_CONFIG", r"DDL_SECRET has 5 bytes; 16 to", DDL_SECRET="short")
        with_file(r"mode 640.*chmod 600", 0o640)
        with_file(r"mode 604.*chmod 600", 0o604)
        with_file(r"DDL_SECRET_FILE has 6 bytes; 16 to", 0o600, "shorty")
        refused("DDL_ERR_CONFIG", r"is not a file", DDL_SECRET_FILE=folder)
        refused("DDL_ERR_CONFIG", r"cannot open .*none.*No such file", DDL_SECRET_FILE=file.with_name("none"))
        file.write_text("a secret in a file, 32 bytes long\n")
        file.chmod(0o600)
        with Job(RANK, "correct", DDL_SECRET=None, DDL_SECRET_FILE=file) as job:
            job.succeed()
        if os.geteuid() == 0:
            os.chown(file, 65534, 65534)
            refused("DDL_ERR_CONFIG", r"belongs to user 65534", DDL_SECRET=None, DDL_SECRET_FILE=file)


@test
def unreadable_secret_file():
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        skip("needs root and setpriv, to become another user")
    with tempfile.TemporaryDirectory(prefix="ddl-test-") as folder:
        os.chmod(folder, 0o755)
        here = pathlib.Path(folder, "rank")
        shutil.copy(RANK, here)
        file = pathlib.Path(folder, "secret")
        file.write_text("a secret in a file, 32 bytes long")
        file.chmod(0o600)
        done = sh(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(here), "init"],
                  env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                       "DDL_SECRET_FILE": str(file)})
        check(re.search(r"DDL_ERR_CONFIG: .*cannot open .*secret of DDL_SECRET_FILE: Permission denied", done.stdout),
              done.stdout)


@test
def different_secrets_do_not_meet():
    with Job(RANK, "init", ranks=2, each={1: {"DDL_SECRET": "not the same secret at all"}},
             DDL_INIT_TIMEOUT_MS=SHORT * 2) as job:
        job.finish(30)
        job.check(failed(job, 1)[0] == "DDL_ERR_AUTH" and "secret" in failed(job, 1)[1], "rank 1")
        job.check(failed(job, 0)[0] == "DDL_ERR_TIMEOUT" and "rank 1" in failed(job, 0)[1], "rank 0")


main()

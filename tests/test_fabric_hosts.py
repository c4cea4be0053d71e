"""libfabric's tcp between two hosts, network namespaces with a cable between them: the suites with their ranks spread over
both, and the same promises as over built-in TCP about cuts, resets, slow cables, stopped and killed ranks; a model that is
trained over it has the same loss.
tests/run: timeout=1000 waits=yes """
import contextlib
import csv
import os
import pathlib
import re
import signal
import time

from harness import BUILD, check, good, main, scratch, sh, skip, test
from host_faults import promise
from jobs import Job, causes, check_causes, drop_rule, program, ranks_in, two_hosts, within
from transport_suites import THIN

RANK = program()
FABRIC = {"DDL_TRANSPORTS": "fabric:tcp", "DDL_PLUGIN_PATH": str(BUILD)}


def job(hosts, words, layout, **more):
    if not (BUILD / "libddl-fabric.so").exists():
        skip("libddl-fabric.so is not built; make plugins builds it where libfabric-dev is installed")
    return Job(RANK, words, hosts=hosts, layout=layout, **{**FABRIC, **more})


# ---------------------------------------------------------------------------------------------- it works


def spread_suite(provider, suite, words):
    path = BUILD / "tests" / "gcc" / suite
    if not path.exists() or not (BUILD / "libddl-fabric.so").exists():
        skip(f"{path} or libddl-fabric.so is not built; tests/run and make plugins build them")
    env = {**FABRIC, "DDL_TRANSPORTS": f"fabric:{provider}"}
    env.update({} if os.environ.get("TEST_TORTURE") else {"FAULT_RUNS": "2", **THIN})
    with two_hosts() as hosts, hosts.spread(**env) as env:
        done = sh(path, *words, env=env, timeout=400)
        last = re.findall(r"^(\d+) passed, (\d+) failed", done.stdout, re.M)
        said = f"{suite} {words} over {provider} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        check(done.returncode == 0 and last and int(last[-1][0]) > 0, said)
        sent = hosts.run("A", "cat /sys/class/net/ddla/statistics/tx_bytes")
        check(int(sent) > 1 << 20, f"only {sent} bytes went over the cable")


# The suites whose ranks are processes: with ranks on both hosts. Through ofi_rxm a sample, and all in long runs.
SUITES = ["p2p", "collectives", "v_forms", "leave", "mismatch", "threads", "stop", "agree", "groups", "persistent"]
SAMPLE = {"p2p": ["between_processes"], "collectives": ["two_ranks", "four_ranks", "every_root"], "v_forms": [], "agree": []}


def add_suite(provider, suite, words):
    def run():
        spread_suite(provider, f"test_{suite}", words)
    run.__name__ = f"{suite}_over_{provider.replace(';', '_')}_with_ranks_on_both"
    test(run)


for each in SUITES:
    add_suite("tcp", each, [])
    if each in SAMPLE or os.environ.get("TEST_TORTURE"):
        add_suite("tcp;ofi_rxm", each, [] if os.environ.get("TEST_TORTURE") else SAMPLE[each])


@test
def all_collectives_2_and_2():
    with two_hosts() as hosts, job(hosts, "correct", "AABB") as j:
        j.succeed()
        j.check("4 ranks on 2 hosts; fabric to 1 rank here and 2 elsewhere" in j.output(0), "another transport was taken")
        j.check(all("correct; " in j.output(r) for r in range(4)), "not all have come to the end")


@test
def all_collectives_1_and_3_interleaved_with_checksums():
    with two_hosts() as hosts, job(hosts, "correct", "BABB", MASTER_ADDR=hosts.address["B"], DDL_CHECK="payload") as j:
        j.succeed()


@test
def shared_memory_inside_and_fabric_between():
    with two_hosts() as hosts, job(hosts, "correct", "ABBA", DDL_TRANSPORTS="shm,fabric:tcp") as j:
        j.succeed()
        j.check("shm to 1 rank here and 0 elsewhere; fabric to 0 ranks here and 2 elsewhere" in
                j.output(0).replace(" (first of DDL_TRANSPORTS that reaches them)", ""), "other transports were taken")


@contextlib.contextmanager
def two_cables(**more):
    """A second cable beside the first, and the variables of a job over both."""
    with two_hosts() as hosts:
        good(f"ip -n {hosts.name['A']} link add ddla2 type veth peer name ddlb2 netns {hosts.name['B']}")
        for side, device, address in (("A", "ddla2", "10.79.0.1"), ("B", "ddlb2", "10.79.0.2")):
            good(f"ip -n {hosts.name[side]} addr add {address}/24 dev {device}")
            good(f"ip -n {hosts.name[side]} link set {device} up")
        end = time.monotonic() + 20
        while hosts.run("B", "cat /sys/class/net/ddlb2/operstate") != "up\n":
            check(time.monotonic() < end, "the second cable did not come up")
            time.sleep(0.05)
        yield hosts, {"DDL_FABRIC_RAILS": 2, "DDL_FABRIC_SUBNET": "10.78.0.0/15", **more}


def sent_over(hosts):
    return [int(hosts.run(side, f"cat /sys/class/net/ddl{side.lower()}{n}/statistics/tx_bytes")) for side in "AB" for n in ("", 2)]


# As two adapters: each rail has an endpoint, addresses, and a domain with keys of its own, and what is large is read. Its connection is made by
# the first read, in which the peer's process helps.
ADAPTERS = {"DDL_TRANSPORTS": "fabric:tcp;ofi_rxm", "DDL_FABRIC_FORCE_MR": "local"}


def share(least, words, layout, **more):
    with two_cables(**more) as (hosts, env), job(hosts, words, layout, **env) as j:
        j.succeed()
        sent = sent_over(hosts)
        j.check(min(sent) > least, f"{sent} bytes went over the two cables, both ways; {least} on each at least")
        j.check("comes through buffers" not in "".join(j.output(r) for r in range(len(layout))), "not all could be read")


@test
def two_rails_share_what_is_read():
    """A second cable beside the first: both carry, and the sums are right."""
    share(4 << 20, "once 4194304", "AB")


@test
def two_rails_of_adapters_share_what_is_read():
    share(4 << 20, "once 4194304", "AB", **ADAPTERS)


@test
def all_collectives_over_two_rails_of_adapters():
    share(1 << 20, "correct", "AABB", **ADAPTERS)


@test
def a_rank_is_killed_while_two_rails_of_adapters_read_from_it():
    """What was under way on both rails ends with its process; the endpoint stays, and the others go on."""
    with two_cables(**ADAPTERS) as (hosts, env), job(hosts, "loop 1000000 600 0", "AABB", **env) as j:
        j.until("looping")
        time.sleep(0.5)
        since = time.monotonic()
        j.signal(3, signal.SIGKILL)
        j.finish(40)
        check_causes(j, [0, 1, 2], [3], since, 1)
        for rank in (0, 1, 2):
            j.check("DDL_OK 3" in j.lines(rank, "shrink")[0] and j.lines(rank, "survived"), f"rank {rank} did not go on")
            j.check("the endpoint is closed" not in j.output(rank), f"rank {rank} closed its endpoint")


def cut_rail(**more):
    """The core's connections and all messages go by the first cable: nobody is dead. What was asked of the second is neither there nor
    failed, so the operation ends at its deadline, and says who it waits for; no sum is wrong."""
    with two_cables(**more) as (hosts, env), job(hosts, "loop 1000000 60 0", "AB", DDL_TIMEOUT_MS=4000, **env) as j:
        j.until("looping")
        time.sleep(0.3)
        before = sent_over(hosts)
        hosts.run("A", "ip link set ddla2 down")
        j.finish(40)
        check(min(before) > 1 << 20, f"{before} bytes went over the two cables: only one was used")
        for rank, (_, status, text) in causes(j, [0, 1]).items():
            j.check(status == "DDL_ERR_TIMEOUT" and ranks_in(text) == {0, 1}, f"rank {rank}: {status} {text}")


@test
def where_the_second_of_two_cables_is_cut_the_deadline_ends_it():
    cut_rail()


@test
def where_the_second_of_two_adapters_is_cut_the_deadline_ends_it():
    cut_rail(**ADAPTERS)


@test
def one_slow_cable():
    """10 Mbit/s: 2 MB between the hosts take more than a second; nothing is given up meanwhile."""
    with two_hosts() as hosts:
        hosts.shape("tbf rate 10mbit burst 16k latency 300ms")
        with job(hosts, "once 500000", "AABB") as j:
            j.succeed(120)
            took = float(j.lines(0, "done")[0]) - float(j.lines(0, "looping")[0])
            j.check(took > 0.8, f"2 MB went over a cable of 10 Mbit/s in {took:.2f} s: it was not used")


def advertised(hosts, **more):
    """Ranks 2 and 3 are reached at another address than that of their interface, as they say."""
    return job(hosts, "correct", "AABB", each={r: {"DDL_ADVERTISE": hosts.address["B"]} for r in (2, 3)}, **more)


@test
def where_an_address_is_advertised_tcp_carries():
    """libfabric knows nothing of that address. Inside a host it goes on."""
    with two_hosts() as hosts:
        with advertised(hosts, DDL_TRANSPORTS="fabric:tcp,tcp") as j:
            j.succeed()
            j.check(re.search(r"fabric to 1 rank here and 0 elsewhere.*; tcp to 0 ranks here and 2 elsewhere", j.output(0)), "others carry")
            j.check(all(("DDL_ADVERTISE is set, and libfabric tells" in j.output(r)) == (r > 1) for r in range(4)), "it is not told")
        with advertised(hosts, DDL_FABRIC_PROVIDER="tcp", DDL_TRANSPORTS="") as j:
            j.succeed()
            j.check("tcp to 1 rank here and 2 elsewhere" in j.output(0) or "; tcp to 0 ranks here and 2 elsewhere" in j.output(0), "others carry")
        with advertised(hosts) as j:
            j.finish()
            j.check(all(re.search(r"no transport reaches rank \d.*DDL_ADVERTISE", j.output(r)) for r in range(4)), "nobody says why")


# ------------------------------------------------------------------------------------------- the default


def default_job(hosts, cache):
    """The times that the first line tells, and what carries between the hosts."""
    with job(hosts, "correct", "AABB", DDL_TUNE_CACHE=cache, DDL_FABRIC_PROVIDER="tcp", DDL_TRANSPORTS="") as j:
        j.succeed()
        told = re.search(r"64 KiB take (\S+) us by fabric, (\S+) us by tcp", j.output(0))
        taken = re.findall(r"(\w+) to \d+ ranks? here and 2 elsewhere", j.output(0))
        j.check(told and len(taken) == 1, "the start does not tell")
        fabric, tcp = float(told[1]), float(told[2])
        j.check(taken[0] == ("tcp" if tcp < fabric else "fabric"), f"{taken}, though {fabric} and {tcp}")
        return fabric, tcp


@test
def the_faster_of_fabric_and_tcp_is_measured_taken_and_kept():
    with two_hosts() as hosts, scratch() as folder:
        cache = pathlib.Path(folder, "cache")
        fabric, tcp = default_job(hosts, cache)
        check(default_job(hosts, cache) == (fabric, tcp), "the second job measured again")
        choice, model = cache.read_text().splitlines()[:2]
        key, a, b, c, d = choice.split()
        cache.write_text(f"{key} {c} {d} {a} {b}\n{model}\n")
        check(default_job(hosts, cache) == (tcp, fabric), "the other one is not taken when the figures say so")


# -------------------------------------------------------------------------------------------- it trains


def losses(folder):
    with open(pathlib.Path(folder, "loss.csv")) as file:
        return [row["loss"] for row in csv.DictReader(file)]


def training(folder, name):
    """Sums in the order of ranks: what is sent together the trainer finds out by the clock, and rings add in its order."""
    (pathlib.Path(folder) / "text").write_bytes(pathlib.Path(__file__).read_bytes() * 4)
    return (f"--layers 1 --dim 32 --heads 2 --context 32 --steps 20 --warmup 5 --save 20 --eval 20 --batch 2 --sample 0 "
            f"--data {folder}/text --out {folder}/{name}").split()


def needs_training():
    for name in ("train_gpt", "ddlrun", "libddl-fabric.so"):
        if not (BUILD / name).exists():
            skip(f"{name} is not built; make builds it")


@test
def training_on_one_host_has_the_loss_of_tcp():
    needs_training()
    with scratch() as folder:
        env = dict(os.environ, DDL_PLUGIN_PATH=str(BUILD), DDL_DETERMINISTIC="1")
        for transport in ("tcp", "fabric:tcp"):
            name = transport.replace(":", "-")
            good(BUILD / "ddlrun", "-n 4 --transport", transport, BUILD / "train_gpt", training(folder, name), env=env)
        check(len(losses(folder + "/tcp")) == 20 and losses(folder + "/tcp") == losses(folder + "/fabric-tcp"),
              f"{losses(folder + '/tcp')} over TCP, {losses(folder + '/fabric-tcp')} over fabric")


@test
def training_on_two_hosts_has_the_loss_of_tcp():
    needs_training()
    with two_hosts() as hosts, scratch() as folder:
        for transport in ("tcp", "fabric:tcp"):
            words = training(folder, transport.replace(":", "-"))
            with Job(BUILD / "train_gpt", *words, hosts=hosts, layout="AABB", DDL_DETERMINISTIC="1",
                     **{**FABRIC, "DDL_TRANSPORTS": transport}) as j:
                j.succeed()
        check(len(losses(folder + "/tcp")) == 20 and losses(folder + "/tcp") == losses(folder + "/fabric-tcp"),
              f"{losses(folder + '/tcp')} over TCP, {losses(folder + '/fabric-tcp')} over fabric")


# ------------------------------------------------------------------------------------------------ faults


def job_by_rxm(hosts, words, layout, **more):
    return job(hosts, words, layout, **{"DDL_TRANSPORTS": "fabric:tcp;ofi_rxm", **more})


promise(job)
promise(job_by_rxm, "_by_ofi_rxm")


@test
def a_firewall_before_the_port_of_libfabric():
    """What goes to rank 1's is dropped, and nothing else: the first call is answered by nobody."""
    with two_hosts() as hosts:
        drop_rule(hosts, "B", "drop", "tcp dport 33301")
        port = {"FI_TCP_PORT_LOW_RANGE": 33301, "FI_TCP_PORT_HIGH_RANGE": 33301}
        with job(hosts, "init", "AB", each={1: port}) as j:
            told, running = {}, True
            while len(told) < 2 and running:
                running = j.process[0].poll() is None  # before the look at what it said
                for word in ("listens on port", "perhaps a firewall drops"):
                    if word in j.output(0):
                        told.setdefault(word, time.monotonic())
                time.sleep(0.01)
            j.finish(30)
            j.check(len(told) == 2 and "no connection of tcp to rank 1 comes about: Connection timed out" in j.output(0), "nobody says why")
            took = told["perhaps a firewall drops"] - told["listens on port"]
            j.check(took < within(4.5), f"the rank behind it was given up after {took:.1f} s")
            print(f"     the rank behind it was given up after {took:.2f} s")


def processor_s(process):
    fields = pathlib.Path("/proc", str(process.pid), "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@test
def stopped_rank_of_the_other_host_is_not_dead():
    """And those who wait for it sleep."""
    with two_hosts() as hosts, job(hosts, "once 4194304", "AABB") as j:
        j.until("looping")
        j.signal(3, signal.SIGSTOP)
        time.sleep(2)
        before = [processor_s(j.process[r]) for r in range(3)]
        time.sleep(4)
        spent = [processor_s(j.process[r]) - before[r] for r in range(3)]
        j.check(max(spent) < 0.4, f"seconds of processor time that ranks used in 4 s of waiting: {spent}")
        j.check(not any(j.lines(r, "error") for r in range(4)), "a stopped rank was reported dead")
        j.check(not any(j.lines(r, "done") for r in (0, 1, 2)), "the sum ended without rank 3")
        j.signal(3, signal.SIGCONT)
        j.succeed()


main()

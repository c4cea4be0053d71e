"""Jobs on two hosts: network namespaces with a cable between them. First that they work, and that settings of the
network are honoured; then that cuts, resets, floods of the cable, stopped and killed ranks are told apart.
tests/run: timeout=450 waits=yes """
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from harness import BUILD, ROOT, check, good, main, sh, skip, test
from host_faults import promise
from jobs import SLOW, Job, causes, drop_rule, program, two_hosts, within

RANK = program()


# ---------------------------------------------------------------------------------------------- it works


@test
def all_collectives_2_and_2():
    with two_hosts() as hosts, Job(RANK, "correct", hosts=hosts, layout="AABB") as job:
        job.succeed()
        job.check("4 ranks on 2 hosts" in job.output(0), "the start does not say who is there")
        job.check(all("correct; " in job.output(r) for r in range(4)), "not all have come to the end")


@test
def all_collectives_1_and_3_interleaved():
    with two_hosts() as hosts, Job(RANK, "correct", hosts=hosts, layout="BABB",
                                   MASTER_ADDR=hosts.address["B"]) as job:
        job.succeed()
        job.check("4 ranks on 2 hosts" in job.output(0), "the start does not say who is there")


@test
def hierarchical_all_reduce_is_right():
    with two_hosts() as hosts, Job(RANK, "correct", hosts=hosts, layout="ABAB", DDL_ALGO="all_reduce=hierarchical",
                                   DDL_CHECK="payload") as job:
        job.succeed()
        job.check("all_reduce by hierarchical" in job.output(0), "another algorithm was taken")


@test
def shared_memory_inside_and_tcp_between():
    shared = {"DDL_PLUGIN_PATH": str(BUILD), "DDL_TRANSPORTS": "shm,tcp"}
    with two_hosts() as hosts, Job(RANK, "correct", hosts=hosts, layout="AABB", **shared) as job:
        job.succeed()
        job.check("shm to 1 rank here and 0 elsewhere; tcp to 0 ranks here and 2 elsewhere" in
                  job.output(0).replace(" (first of DDL_TRANSPORTS that reaches them)", ""), "other transports were taken")
    with two_hosts() as hosts, Job(RANK, "correct", hosts=hosts, layout="ABBA", DDL_ALGO="native_hierarchical",
                                   **shared) as job:
        job.succeed()
        job.check("all_reduce by native_hierarchical" in job.output(0), "another algorithm was taken")


@test
def a_rank_that_dies_on_either_host_comes_back():
    """The suite of growing groups, its ranks in turn on both hosts: newcomers come over the cable to a member of the host
    of the rendezvous, also after rank 0 has died there."""
    path = BUILD / "tests" / "gcc" / "test_grow"
    if not path.exists():
        skip(f"{path} is not built; tests/run builds it")
    with two_hosts() as hosts, hosts.spread() as env:
        done = sh(path, "a_killed_rank", "another_member", "ranks_that_die", env=env, timeout=200 * SLOW)
        check(done.returncode == 0 and "3 passed, 0 failed" in done.stdout, done.stdout[-3000:])
        check(int(hosts.run("A", "cat /sys/class/net/ddla/statistics/tx_bytes")) > 1 << 20, "nothing went over the cable")


@test
def one_slow_cable():
    """10 Mbit/s: 1 MiB between the hosts takes a second; nothing is given up meanwhile."""
    with two_hosts() as hosts:
        hosts.shape("tbf rate 10mbit burst 16k latency 300ms")
        with Job(RANK, "once 500000", hosts=hosts, layout="AABB") as job:
            job.succeed(120)
            took = float(job.lines(0, "done")[0]) - float(job.lines(0, "looping")[0])
            job.check(took > 0.8, f"2 MB went over a cable of 10 Mbit/s in {took:.2f} s: it was not used")


@test
def local_sgd_is_sooner_over_a_slow_cable():
    """10 Mbit/s: examples/local_sgd averages 80 KB a hundred times in BSP, which takes the cable 6.4 s, and 12 or 5 times."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.shape("tbf rate 10mbit burst 16k latency 300ms")
        with Job("env", f"-C {folder} {BUILD}/local_sgd", hosts=hosts, layout="AB") as job:
            job.succeed(150)
            found = re.findall(r"reached the loss of 0.03 after ([0-9.]+) s; 100 steps took ([0-9.]+) s", job.output(0))
            job.check(len(found) == 3, "not three ways have reached the loss")
            (bsp, all_bsp), (local, _), (diloco, _) = [[float(x) for x in pair] for pair in found]
            job.check(all_bsp > 5, f"BSP took {all_bsp} s: the cable was not used")
            job.check(local < bsp and diloco < bsp, f"{bsp} s in BSP, {local} s with local SGD, {diloco} s with DiLoCo")


# ---------------------------------------------------------------------------------- who may join, and where


@test
def without_a_secret_it_is_refused():
    with two_hosts() as hosts, Job(RANK, "init", hosts=hosts, layout="AB", DDL_SECRET=None,
                                   DDL_INIT_TIMEOUT_MS=3000) as job:
        codes = job.finish()
        job.check(codes == {0: 1, 1: 1}, f"exit statuses {codes}")
        job.check("DDL_ERR_AUTH" in job.output(1) and "has no secret" in job.output(1) and
                  "DDL_SECRET_FILE" in job.output(1), "rank 1 is not told that a secret is needed")
        job.check("failed DDL_ERR_TIMEOUT" in job.output(0) and "rank 1" in job.output(0), "rank 0 does not name rank 1")


@test
def loopback_as_master_is_explained():
    with two_hosts() as hosts, Job(RANK, "init", hosts=hosts, layout="AABB", MASTER_ADDR="127.0.0.1",
                                   DDL_INIT_TIMEOUT_MS=3000) as job:
        codes = job.finish()
        job.check(all(c == 1 for c in codes.values()), f"exit statuses {codes}")
        for rank in (2, 3):
            job.check(re.search(r"127\.0\.0\.1.*leads only to processes of the same machine", job.output(rank)),
                      f"rank {rank} is not told that 127.0.0.1 leads to no other machine")
        job.check(re.search(r"ranks? 2.*3", job.output(0)), "rank 0 does not name those who are missing")


@test
def name_that_is_loopback_at_home_is_explained():
    """Debian's installer writes the machine's own name as 127.0.1.1 into /etc/hosts."""
    with two_hosts() as hosts:
        hosts.names("A", "127.0.0.1 localhost\n127.0.1.1 nodea\n")
        hosts.names("B", f"127.0.0.1 localhost\n{hosts.address['A']} nodea\n")
        with Job(RANK, "init", hosts=hosts, layout="AB", MASTER_ADDR="nodea", DDL_INIT_TIMEOUT_MS=3000) as job:
            job.finish()
            job.check("loopback address" in job.output(0), "rank 0 is not told what its name means")
        with Job(RANK, "correct", hosts=hosts, layout="AABB", MASTER_ADDR="nodea",
                 each={0: {"DDL_INTERFACE": "ddla"}, 1: {"DDL_INTERFACE": "ddla"}}) as job:
            job.succeed()


def listeners(hosts, side):
    """(address, port) of all that listens on TCP on one side, by pid of the ranks."""
    out = hosts.run(side, "ss -Hltnp")
    return [re.match(r"\S+\s+\S+\s+\S+\s+(\S+):(\d+)", line).groups() for line in out.splitlines()]


@test
def interface_and_port_range_are_honoured():
    with two_hosts() as hosts:
        env = {r: {"DDL_INTERFACE": "ddla" if r < 2 else "ddlb"} for r in range(4)}
        with Job(RANK, "loop 10 2 1", hosts=hosts, layout="AABB", each=env, DDL_PORT_RANGE="33100-33101") as job:
            job.until("looping")
            for side in "AB":
                found = sorted((a, int(p)) for a, p in listeners(hosts, side))
                wanted = [(hosts.address[side], 33100), (hosts.address[side], 33101)]
                job.check(found == wanted, f"on {side} {found} listen, not {wanted}")
            job.succeed()
        with Job(RANK, "loop 10 0.1 1", hosts=hosts, layout="AABB", each=env, DDL_PORT_RANGE="33100-33101") as job:
            job.succeed()  # at once again
        with Job(RANK, "init", hosts=hosts, layout="AAAB", DDL_PORT_RANGE="33100-33101",
                 DDL_INIT_TIMEOUT_MS=2500) as job:
            job.finish()
            job.check(any("33100-33101" in job.output(r) and "cannot listen" in job.output(r) for r in range(3)),
                      "no rank says that the range has no free port")


@test
def advertised_address_is_used():
    with two_hosts() as hosts:
        env = {r: {"DDL_ADVERTISE": hosts.proxy["B"], "DDL_INTERFACE": None} for r in (2, 3)}
        # B's ranks listen on .2; what comes to .12 goes there by address translation, as with a load balancer.
        if sh(hosts.into("B"), "nft add table ip ddl").returncode:
            skip("nft does not work here")
        hosts.run("B", ["nft", "add chain ip ddl in { type nat hook prerouting priority -100 ; }"])
        ruled = sh(hosts.into("B"), ["nft", f"add rule ip ddl in ip daddr {hosts.proxy['B']} counter dnat to {hosts.address['B']}"])
        if ruled.returncode:
            skip(f"this kernel has no address translation: {ruled.stdout.strip()[:100]}")
        with Job(RANK, "correct", hosts=hosts, layout="AABB", each=env) as job:
            job.succeed()
            count = int(re.search(r"packets (\d+)", hosts.run("B", "nft list table ip ddl"))[1])
            job.check(count > 0, "nobody used the advertised address")


@test
def a_bridge_of_containers_is_never_advertised():
    """Both hosts have docker0 with one address, as they come; without DDL_INTERFACE the way to rank 0 decides."""
    with two_hosts() as hosts:
        for side in "AB":
            good(f"ip -n {hosts.name[side]} link add name docker0 type bridge")
            good(f"ip -n {hosts.name[side]} addr add 172.17.0.1/16 dev docker0")
            good(f"ip -n {hosts.name[side]} link set docker0 up")
        with Job(RANK, "correct", hosts=hosts, layout="BBAA", MASTER_ADDR=hosts.address["B"], DDL_INTERFACE=None,
                 DDL_LOG="debug") as job:
            job.succeed()
            for rank in range(4):
                job.check("172.17." not in job.output(rank), f"rank {rank} speaks of the bridge")
                job.check("correct; " in job.output(rank), f"rank {rank} has not come to the end")


@test
def unknown_interface_is_named():
    with two_hosts() as hosts, Job(RANK, "init", hosts=hosts, layout="AB", DDL_INTERFACE="eth77",
                                   DDL_INIT_TIMEOUT_MS=3000) as job:
        codes = job.finish()
        job.check(codes == {0: 1, 1: 1}, f"exit statuses {codes}")
        for rank in (0, 1):
            job.check(re.search(r"failed DDL_ERR_CONFIG: .*eth77.*", job.output(rank)), f"rank {rank} does not name eth77")


@test
def folder_as_meeting_place():
    with two_hosts() as hosts, Job(RANK, "init", hosts=hosts, layout="AABB", MASTER_ADDR=None, MASTER_PORT=None,
                                   only=[]) as job:
        job.env.update(DDL_RENDEZVOUS=f"file://{job.folder.name}", DDL_INTERFACE="ddla")
        job.each = {r: {"DDL_INTERFACE": "ddlb"} for r in (2, 3)}
        job.words[1:] = ["correct"]
        for rank in range(4):
            job.start(rank)
        job.succeed()


@test
def firewall_is_suspected():
    """The port of rank 0 is open, the others are not: the sentence says what could not be reached, and why perhaps."""
    with two_hosts() as hosts:
        with Job(RANK, "init", hosts=hosts, layout="AB", DDL_INIT_TIMEOUT_MS=int(15000 * SLOW), only=[]) as job:
            for side in "AB":
                drop_rule(hosts, side, "drop", f"iifname {hosts.device[side]} tcp dport != {job.env['MASTER_PORT']} "
                          "tcp flags & (syn | ack) == syn")
            start = time.monotonic()
            job.start(0), job.start(1)
            codes = job.finish()
            job.check(codes == {0: 1, 1: 1}, f"exit statuses {codes}")
            for rank in (0, 1):
                job.check("firewall" in job.output(rank), f"rank {rank} does not think of a firewall")
            job.check(time.monotonic() - start < within(10), "it took too long to find out")


# ------------------------------------------------------------------------------------------------ faults


promise(lambda hosts, words, layout: Job(RANK, words, hosts=hosts, layout=layout))


@test
def stopped_rank_of_the_other_host_is_not_dead():
    """Its kernel still answers for it, with a window of zero: whole buffers wait for 6 s, and then go on."""
    with two_hosts() as hosts, Job(RANK, "once 4194304", hosts=hosts, layout="AABB") as job:
        job.until("looping")
        job.signal(3, signal.SIGSTOP)
        time.sleep(6)
        job.check(not any(job.lines(r, "error") for r in range(4)), "a stopped rank was reported dead")
        job.check(not any(job.lines(r, "done") for r in (0, 1, 2)), "the sum ended without rank 3")
        job.signal(3, signal.SIGCONT)
        job.succeed()



class Proxies:
    """A flip_proxy in front of each host; what B says to A's ranks, and A to B's, goes through one."""

    def __init__(self, hosts, first, last):
        self.running = [subprocess.Popen(
            hosts.into(side) + [sys.executable, str(ROOT / "tests" / "flip_proxy.py"), hosts.proxy[side],
                                hosts.address[side], str(first), str(last)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for side in "AB"]
        for p in self.running:
            check(p.stdout.readline() == "ready\n", "the proxy does not start")

    def flip(self, offset):
        """One bit on one side. Ranks of one side may have made all connections: then the other has nothing to damage."""
        for p in self.running:
            p.stdin.write(f"{offset}\n")
            p.stdin.flush()
            if select.select([p.stdout], [], [], 1 * SLOW)[0]:
                return
            p.stdin.write("none\n")
            p.stdin.flush()
        check(False, "no frame of a collective came by")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for p in self.running:
            p.kill()
            p.communicate()


def damaged(offsets, **env):
    """One flipped bit in each job: everybody reports an error that names a rank, and no sum is wrong. Who is said to have
    sent it is cut off by the others, and finds them gone."""
    with two_hosts() as hosts:
        for offset in offsets:
            each = {r: {"DDL_ADVERTISE": hosts.proxy["A" if r < 2 else "B"]} for r in range(4)}
            with Proxies(hosts, 33200, 33201) as proxies, \
                    Job(RANK, "loop 1000 600 1", hosts=hosts, layout="AABB", each=each, DDL_PORT_RANGE="33200-33201",
                        **env) as job:
                job.until("looping")
                proxies.flip(offset)
                codes = job.finish(30)
                job.check(all(c == 0 for c in codes.values()), f"a bit at {offset}: exit statuses {codes}")
                found = causes(job, range(4))
                for rank, (_, status, text) in found.items():
                    job.check(status in ("DDL_ERR_PEER", "DDL_ERR_CORRUPT") and re.search(r"\brank \d", text),
                              f"rank {rank} does not name one")
                texts = [text for _, _, text in found.values()]
                job.check(sum("damaged bytes" in t for t in texts) >= 3, f"the cause is not told: {texts}")
                job.check(sum(job.output(r).count("survived") for r in range(4)) == 3, "not the three others went on")


@test
def flipped_bits_of_headers():
    damaged([1, 4, 9, 13, 25, 33, 45])


@test
def flipped_bits_of_payloads():
    damaged([48, 700], DDL_CHECK="payload")


main()

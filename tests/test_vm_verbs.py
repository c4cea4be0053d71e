"""libfabric's verbs over software RoCE, in one boot of the emulated machine (tests/vm): the suites that other transports
pass (test_transport_suites.py, test_transport_failures.py), on one host or with ranks on two, by turns (turns.py), and of each those of its tests
whose turn it is, so many as a few minutes have room for (all of them, in both ways, with VERBS_ALL=1 in the environment, by hand;
tests/RUNS.md); then jobs over a slow and lossy cable, with a rank that is killed, with a cable that is cut, and with two devices on each host.
The counters of the devices say that it was RDMA that carried.
tests/run: timeout=700 """
import functools
import math
import os
import re
import shutil

import turns
from harness import BUILD, check, good, main, skip, test
from jobs import VM, cause, in_machine, program, ranks_in, within

ALL = os.environ.get("VERBS_ALL")
# How long all tests of each take, on one host and on two, in seconds of a machine that two cores emulate (2026-11-29).
FULL_S = {"collectives": (50, 58), "requests": (21, 0), "persistent": (11, 12), "stop": (15, 21), "agree": (20, 19), "mismatch": (52, 52),
          "v_forms": (35, 43), "p2p": (137, 66), "groups": (63, 16), "threads": (110, 13), "leave": (67, 76)}
SUITES = list(FULL_S)
ROOM_S = 15  # for each

PLACES = ["one-host", "two-hosts"]
LEFT_OUT = [f"{where}-{suite}" for suite in SUITES for i, where in enumerate(PLACES)
            if not ALL and suite != "requests" and  # whose ranks are threads, and on one host
            not turns.has_come(f"verbs {suite}", which=i, of=2)]


def turn(suite, place):
    """Which part of the tests of a suite it is, of how many (TEST_PART of test.h)."""
    tests = good(BUILD / "tests" / "gcc" / f"test_{suite}", "-l").split()
    of = min(math.ceil(FULL_S[suite][place] / ROOM_S), len(tests)) or 1
    return f"{turns.number(f'verbs {suite}') // len(PLACES) % of}/{of}"


class Part:
    def __init__(self, text, status, seconds, packets):
        self.text, self.status, self.seconds, self.packets = text, int(status), float(seconds), packets

    def check(self, condition, sentence):
        check(condition, f"{sentence}\n{self.text[-5000:]}" if not condition else "")


def boot():
    """What each part printed, by name."""
    tests, plugin = BUILD / "tests" / "gcc", BUILD / "libddl-fabric.so"
    programs = [tests / f"test_{name}" for name in SUITES]
    if not plugin.exists():
        skip("libddl-fabric.so is not built; make plugins builds it where libfabric-dev is installed")
    for needed in programs:
        if not needed.exists():
            skip(f"{needed} is not built; tests/run builds it")
    setpriv = shutil.which("setpriv") or skip("setpriv is not installed (make deps)")
    parts = [f"{where}-{suite}={turn(suite, i)}" for suite in SUITES for i, where in enumerate(PLACES)]
    out = in_machine("two-hosts", VM / "verbs", tests, program(), files=[VM, *programs, program(), plugin, setpriv],
                     seconds=5400 if ALL else 560, megabytes=3072, partly=True, VERBS_PARTS="" if ALL else " ".join(parts),
                     TEST_SEED=turns.number("seed") % 1000 + 1, VERBS_LEFT_OUT=" ".join(LEFT_OUT),
                     DDL_TRANSPORTS="fabric:verbs", DDL_PLUGIN_PATH=BUILD, DDL_INIT_TIMEOUT_MS=60000)
    found = {}
    for name, text, status, seconds, *packets in re.findall(
            r"^begin (\S+)\n(.*?)^part \1 (\d+) (\S+) (\d+) (\d+)$", out, re.M | re.S):
        found[name] = Part(text, status, seconds, [int(p) for p in packets])
    check(found, f"no part of it ran:\n{out[-4000:]}")
    return found


@functools.lru_cache(maxsize=None)
def outcome():
    """The machine is booted once: its parts, or why there are none."""
    try:
        return boot()
    except Exception as why:
        return why


def part(name):
    found = outcome()
    if isinstance(found, Exception):
        raise found
    check(name in found, f"the machine did not come to {name}, only to {list(found)}")
    of = found[name]
    print(f"     {name}: {of.seconds:.0f} s, {of.packets[0]} and {of.packets[1]} RDMA packets")
    return of


def check_suite(name):
    if name in LEFT_OUT:
        skip(turns.REASON)
    of = part(name)
    last = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped", of.text, re.M)
    of.check(of.status == 0 and last and last[-1][1] == "0", f"status {of.status}")
    left_out = re.findall(r"^skip .*", of.text, re.M)
    cases = re.findall(r"^\d+ (?:cases|tests) left out .*", of.text.replace("\r", ""), re.M)
    print("".join(f"     {line}\n" for line in left_out + cases), end="")
    if last[-1][0] == "0":
        skip(f"all its tests are: {left_out[0].partition(': ')[2]}")
    devices = of.packets if name.startswith("two-hosts") else of.packets[:1]
    of.check(all(sent > 20 for sent in devices), f"not all by RDMA: {of.packets} packets")


def add_suite(hosts, suite):
    def run():
        check_suite(f"{hosts}-{suite}")
    run.__name__ = f"{suite}_on_{hosts.replace('-', '_')}"
    test(run)


for place in PLACES:
    for each in SUITES:
        add_suite(place, each)


def check_job(name, ranks=4):
    of = part(name)
    of.check(of.status == 0 and of.text.count("correct; ") == ranks, f"status {of.status}")
    of.check("4 ranks on 2 hosts" in of.text, "the start does not say who is there")
    of.check("is dead" not in of.text and "cut off" not in of.text, "somebody was taken for dead")
    of.check(min(of.packets) > 100, f"no RDMA: {of.packets} packets")
    return of


@test
def a_job_of_one_host_that_meets_at_loopback():
    """Its 8 MB go by RDMA: in packets of at most 4096 bytes, on the device of that host alone. By the other, connections of the part before
    may end late."""
    of = part("one-host-at-loopback")
    of.check(of.status == 0 and "2 ranks on 1 host" in of.text, f"status {of.status}")
    of.check(of.text.count("done") == 2 and "fabric to 1 rank here" in of.text, "the sum did not end, or by another way")
    of.check(of.packets[0] * 4096 >= 8_000_000 and of.packets[1] < 20, f"{of.packets} packets")


@test
def two_rails_share_what_is_read():
    """Two devices on each host. Each direction has 4 MB, half of it by the second: in packets of at most 4096 bytes."""
    of = part("two-rails")
    of.check(of.status == 0 and of.text.count("done") == 2, f"status {of.status}")
    of.check(re.search(r"verbs;ofi_rxm on rxe2 .*: is taken", of.text), "the second device is not taken")
    second = [int(n) for n in re.search(r"^by the second: (\d+) (\d+)", of.text, re.M).groups()]
    of.check(min(second + of.packets) * 4096 >= 2_000_000, f"{of.packets} packets by the first devices, {second} by the second")


SENTENCE = (r"fabric: \S.* failed on verbs;ofi_rxm: Cannot allocate memory\. This process may lock 64 KiB of memory\. "
            r"Raise the limit: `ulimit -l unlimited`")


@test
def too_little_locked_memory_ends_a_job_that_names_verbs():
    """The kernel refuses what is registered; both ranks say what is to be done, and nothing hangs."""
    of = part("locked")
    of.check(of.status == 1, f"status {of.status}")
    of.check(len(re.findall(rf"^failed DDL_ERR_SYSTEM: ddl_init: transport fabric cannot be opened: {SENTENCE}", of.text, re.M)) == 2,
             "not both ranks end with the sentence")


@test
def where_verbs_is_not_named_tcp_is_used():
    of = part("locked-and-free")
    of.check(of.status == 0 and of.text.count("done") == 2 and "2 ranks on 1 host" in of.text, f"status {of.status}")
    of.check(len(re.findall(rf"^ddl: rank [01]: {SENTENCE}", of.text, re.M)) == 2, "not both ranks warn")
    of.check(not any(of.packets), f"{of.packets} packets by RDMA")


@test
def all_collectives_2_and_2():
    of = check_job("two-hosts-all")
    of.check("fabric to 1 rank here and 2 elsewhere" in of.text, "another transport carried")


@test
def a_slow_cable():
    of = check_job("delay")
    latency = float(re.search(r"correct; .*latency (\S+) s", of.text)[1])
    of.check(0.001 < latency < 0.1, f"latency {latency} s measured on a cable of 1 ms")


@test
def a_lossy_cable():
    check_job("loss")


def check_deaths(of, host, survivors, named, limit):
    """So many ranks of a host report DDL_ERR_PEER in time, and name one or more of the ranks in `named`, no others."""
    at = int(re.search(r"^at (\d+) hundredths$", of.text, re.M)[1]) / 100
    said = re.search(rf"^host {host}\n(.*?)(?:^host|\Z)", of.text, re.M | re.S)[1]
    errors = re.findall(r"^error (\S+) (\w+): (.*)$", said, re.M)
    of.check(len(errors) == survivors, f"{len(errors)} ranks of host {host} report an error")
    of.check({status for _, status, _ in errors} == {"DDL_ERR_PEER"}, "not all say DDL_ERR_PEER")
    for _, _, text in errors:
        found = ranks_in(cause(text))
        of.check(found and found <= named, f"the cause names {found}, not of {named}: {text}")
    slowest = max(float(when) for when, _, _ in errors) - at
    print(f"     host {host} after {slowest:.2f} s: {cause(errors[0][2])}")
    of.check(slowest < 4 * within(limit), f"host {host} reported after {slowest:.1f} s, {limit} s are promised; the machine "
             "is emulated, and may take four times that")


@test
def a_killed_rank_is_named_by_all():
    of = part("killed")
    check_deaths(of, 0, 2, {3}, 5)
    check_deaths(of, 1, 1, {3}, 5)
    of.check(of.text.count("survived") == 3, "not the three others went on")


@test
def a_cut_cable_is_noticed():
    of = part("cut-off")
    check_deaths(of, 0, 2, {2, 3}, 5)
    check_deaths(of, 1, 2, {0, 1}, 5)


main()

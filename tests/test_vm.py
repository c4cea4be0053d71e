"""Jobs over a slow and lossy cable: a virtual machine whose kernel can delay and drop packets (tests/vm). Each in the
two kinds of network that it has. The sums are right, nobody is taken for dead, and what was measured at the start fits
the cable.
tests/run: timeout=300 """
import re
import time

from harness import check, main, test
from jobs import VM, in_machine, program


def boot(net, netem, *command):
    """Runs a job of 2 + 2 ranks in the machine and returns its output."""
    rank = program()
    start = time.monotonic()
    out = in_machine(net, "both", VM / "job", 2, rank, *command, netem=netem, files=[VM / "job", rank])
    print(f"     {net}, {netem}: {time.monotonic() - start:.0f} s with booting")
    return out


def check_job(out):
    check("4 ranks on 2 hosts" in out, "the start does not say who is there:\n" + out)
    check(out.count("correct; ") == 4, "not all ranks came to the end:\n" + out)
    check("is dead" not in out and "cut off" not in out, "somebody was taken for dead:\n" + out)


def check_figures(out, least_s):
    """Delay is added on each way. The emulation itself adds milliseconds, on a busy machine tens of them."""
    estimate, taken, latency = map(float, re.search(r"correct; .*: (\S+) s estimated, (\S+) s taken, latency (\S+) s",
                                                    out).groups())
    check(least_s < latency < 20 * least_s, f"latency {latency} s measured on a cable of {least_s} s")
    check(estimate > 2 * least_s and taken / 20 < estimate < taken * 20, f"{estimate} s estimated, {taken} s taken")


@test
def two_namespaces_with_delay_and_loss():
    out = boot("netns", "delay 5ms loss 1%", "correct", "5000")
    check_job(out)
    check_figures(out, 0.005)


@test
def two_hosts_with_delay_and_loss():
    """RDMA's kind of network: one kernel, two interfaces; DDL_INTERFACE says which is ours."""
    out = boot("two-hosts", "delay 5ms loss 1%", "correct", "5000")
    check_job(out)
    check_figures(out, 0.005)


main()

"""Jobs over a slow and lossy cable: a virtual machine whose kernel can delay and drop packets (tests/vm). Each in the
two kinds of network that it has. The sums are right, nobody is taken for dead, and what was measured at the start fits
the cable.
tests/run: timeout=300 """
import re
import shutil
import time

from harness import ROOT, check, main, sh, skip, test
from jobs import SECRET, SLOW, program

VM = ROOT / "tests" / "vm"


def boot(net, netem, *command, seconds=110):
    """Runs a job of 2 + 2 ranks in the machine and returns its output."""
    for needed in ("qemu-system-x86_64", "busybox", "cpio", "dpkg-query"):
        if not shutil.which(needed):
            skip(f"{needed} is not installed (make deps)")
    rank = program()
    start = time.monotonic()
    done = sh([str(VM / "rdma-vm"), "--net", net, "--netem", netem, "--timeout", str(int(seconds * SLOW)),
               "--env", f"DDL_SECRET={SECRET}", "--env", "DDL_LOG=info", "--env", "DDL_INIT_TIMEOUT_MS=60000",
               "--file", str(VM / "job"), str(rank), "--", "both", str(VM / "job"), "2", str(rank), *command],
              timeout=(seconds + 120) * SLOW)
    missing = re.search(r"rdma-vm: (missing packages.*|could not download.*|no linux-image.*)", done.stdout)
    if done.returncode == 125 and missing:
        skip(missing[1])
    check(done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout[-4000:]}")
    print(f"     {net}, {netem}: {time.monotonic() - start:.0f} s with booting")
    return done.stdout


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

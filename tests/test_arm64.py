"""Ranks of 64-bit Arm, emulated, in one job with ranks of this machine, over TCP and over shared memory: all get the same
bits, those of a job of this machine alone, though the compiler may fuse products and sums for Arm as it does for
programs by default. tests/run: timeout=300 """
import functools
import platform
import shutil

from harness import BUILD, WARNINGS, check, good, main, skip, test
from jobs import Job

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
FOLDER = BUILD / "tests" / "mixed"
# The last line: what ranks give to PowerSGD need not have the bits of another processor, only what comes of it be the same.
POWER = "compression 10 "


@functools.cache
def built():
    """Builds the rank for both processors, and a script that starts every second rank as an Arm where MIXED is 1."""
    if platform.machine() != "x86_64":
        skip(f"this machine is {platform.machine()}, and the other kind is to be Arm beside x86-64")
    missing = [program for program in (CROSS, EMULATOR[0]) if not shutil.which(program)]
    if missing:
        skip(f"{' and '.join(missing)} not installed (make deps)")
    (FOLDER / "arm64").mkdir(parents=True, exist_ok=True)
    here, arm = FOLDER / "rank", FOLDER / "arm64" / "rank"
    good("gcc -std=c11 -O1 -I.", WARNINGS, "-o", here, "tests/mixed_rank.c", BUILD / "libddl.a", "-lpthread -ldl")
    fused = "-O1 -fexpensive-optimizations -ffp-contract=fast"  # what fuses is a part of -O2, in half the time
    good(CROSS, "-std=c11", fused, "-I. -D_GNU_SOURCE -DDDL_IMPLEMENTATION", WARNINGS, "-o", arm,
         "tests/mixed_rank.c -lpthread -ldl", timeout=300)
    good(CROSS, "-std=c11 -O1 -I. -fPIC -shared -fvisibility=hidden", WARNINGS, "-o", FOLDER / "arm64/libddl-shm.so",
         "plugins/shm/shm.c", timeout=300)
    script = FOLDER / "start"
    script.write_text(f"""#!/bin/sh
case "$MIXED$RANK" in
1[13]) DDL_PLUGIN_PATH={FOLDER}/arm64 exec {" ".join(EMULATOR)} {arm};;
esac
exec {here}
""")
    script.chmod(0o755)
    return script


def results(transport, mixed):
    """What each rank printed, which must be the same for all: by line the digest of all that it had got until then."""
    with Job(built(), ranks=4, MIXED=mixed, DDL_TRANSPORTS=transport, DDL_PLUGIN_PATH=BUILD, DDL_DETERMINISTIC=1,
             DDL_TIMEOUT_MS=100000) as job:
        job.succeed(120)
        lines = [[line for line in job.output(rank).splitlines() if not line.startswith("ddl: ")] for rank in range(4)]
        job.check(len(lines[0]) == 40 and lines[0][-1].startswith(POWER), "not all that was to be done")
        for rank in range(1, 4):
            differ = [f"{a}, {b}" for a, b in zip(lines[0], lines[rank]) if a != b]
            job.check(lines[rank] == lines[0], f"rank {rank} differs from rank 0: {differ[:1]}")
        return lines[0]


def mixed_over(transport):
    expected, got = results(transport, 0), results(transport, 1)
    differ = [f"{a}, {b}" for a, b in zip(expected, got) if a != b and not a.startswith(POWER)]
    check(not differ, f"with Arm ranks over {transport} it is not what x86-64 alone gets: {differ[:1]}")


@test
def mixed_over_tcp():
    mixed_over("tcp")


@test
def mixed_over_shared_memory():
    mixed_over("shm")


main()

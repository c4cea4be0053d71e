"""Models of what ranks do with shared memory, checked in all interleavings by spin: tests/models/*.pml. Each names bugs
that can be planted, and each of those has to be found, so that a model which sees nothing does not pass.
tests/run: timeout=600 """
import re
import shutil
import time

from harness import ROOT, check, main, scratch, sh, skip, test

MODELS = ROOT / "tests" / "models"


def explore(model, *defines, level="-O2"):
    """Number of errors found, and the report. Without partial knowledge: a search cut short is a failure."""
    for needed in ("spin", "gcc"):
        if not shutil.which(needed):
            skip(f"{needed} is not installed (make deps)")
    with scratch() as folder:
        flags = [f"-D{d}" for d in defines]
        made = sh("spin", "-a", *flags, str(MODELS / f"{model}.pml"), cwd=folder)
        check(made.returncode == 0, f"spin -a failed:\n{made.stdout}")
        built = sh("gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=6000", "-o", "pan", "pan.c", cwd=folder)
        check(built.returncode == 0, f"the checker does not compile:\n{built.stdout[-2000:]}")
        start = time.monotonic()
        done = sh("./pan", "-m2000000", cwd=folder, timeout=280)
    found = re.search(r"errors: (\d+)", done.stdout)
    states = re.search(r"^\s*([\d.e+]+) states, stored", done.stdout, re.M)
    check(found and states, f"no result:\n{done.stdout[-2000:]}")
    print(f"     {model} {' '.join(defines)}: {states[1]} states, {found[1]} errors, {time.monotonic() - start:.1f} s")
    return int(found[1]), done.stdout


def right(model, *defines):
    errors, report = explore(model, *defines)
    check(errors == 0, f"{model} {defines}:\n{report[-2500:]}")
    check("search depth too small" not in report and "out of memory" not in report, f"cut short:\n{report[-2000:]}")


def wrong(model, *defines):
    """It is found sooner than the checker is optimised."""
    check(explore(model, *defines, level="-O0")[0] > 0, f"{model}: the planted {defines} was not found")


@test
def arrivals():
    right("arrival", "N=2", "OPS=6")
    right("arrival", "N=3", "OPS=2", "COARSE")
    right("arrival", "N=2", "OPS=5", "SLEEPER")


@test
def arrivals_with_planted_bugs():
    for bug in ("BUG_FENCE", "BUG_LOOK", "BUG_SLOT", "BUG_PIECE"):
        wrong("arrival", "N=2", "OPS=5", bug)  # the last one is not repaired by the wake-up of a later word
    for bug in ("BUG_FENCE", "BUG_LOOK"):
        wrong("arrival", "N=2", "OPS=5", "SLEEPER", bug)


@test
def rounds():
    right("rounds", "N=2", "ROUNDS=5")
    right("rounds", "N=3", "ROUNDS=3")
    right("rounds", "N=2", "ROUNDS=5", "SPLIT")
    right("rounds", "N=3", "ROUNDS=4", "SPLIT", "COARSE")


@test
def rounds_with_planted_bugs():
    wrong("rounds", "N=2", "ROUNDS=5", "BUG_ROOM")
    wrong("rounds", "N=2", "ROUNDS=5", "BUG_INPLACE")
    wrong("rounds", "N=2", "ROUNDS=5", "SPLIT", "BUG_OWN")
    wrong("rounds", "N=3", "ROUNDS=4", "SPLIT", "COARSE", "BUG_ROOM")
    wrong("rounds", "N=3", "ROUNDS=4", "SPLIT", "COARSE", "BUG_OWN")


@test
def pairs():
    right("pairs", "N=2", "OPS=5")
    right("pairs", "N=2", "OPS=4", "UNITS=5", "ROOM=3")
    right("pairs", "N=3", "OPS=2", "UNITS=2", "ROOM=1", "COARSE")


@test
def pairs_with_planted_bugs():
    for bug in ("BUG_ROOM", "BUG_INPLACE", "BUG_EARLY", "BUG_COUNT", "BUG_FREE", "BUG_BASE"):
        wrong("pairs", "N=2", "OPS=2", bug)
    wrong("pairs", "N=3", "OPS=2", "UNITS=2", "ROOM=1", "COARSE", "BUG_EARLY")


@test
def direct():
    right("direct", "N=2", "OPS=5")
    right("direct", "N=3", "OPS=2")
    right("direct", "N=3", "OPS=3", "COARSE")


@test
def direct_with_planted_bugs():
    for bug in ("BUG_FENCE", "BUG_PAGES", "BUG_LOOK", "BUG_TOLD", "BUG_READ", "BUG_ARRIVE", "BUG_EDGE"):
        wrong("direct", "N=2", "OPS=3", bug)


@test
def ring():
    right("ring", "RECORDS=8")


@test
def ring_with_planted_bugs():
    for bug in ("BUG_CLEAR", "BUG_BEHIND", "BUG_TELL", "BUG_AHEAD", "BUG_FORGET"):
        wrong("ring", "RECORDS=8", bug)


@test
def room():
    right("room", "RECORDS=6")
    right("room", "RECORDS=6", "SLEEPER")


@test
def room_with_planted_bugs():
    for bug in ("BUG_FENCE", "BUG_LOOK", "BUG_RECORD", "BUG_THREAD", "BUG_WANT", "BUG_TELL"):
        wrong("room", "RECORDS=6", bug)
        wrong("room", "RECORDS=6", "SLEEPER", bug)


main()

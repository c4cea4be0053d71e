"""Each tests/fuzz/fuzz_NAME.c (a libFuzzer target) runs over its corpus/NAME, what was found once included, and then
over new inputs for some seconds. New inputs go to build/fuzz, never to the corpus: what is worth keeping is copied
there by hand. Torture: each target to 10^8 executions in all, on all cores, taken up where it was left.
    tests/run: timeout=600
"""
import concurrent.futures
import os
import shutil
import sys
import tempfile
import time

import turns
from harness import BUILD, ROOT, check, main, sh, skip, test

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import campaign  # noqa: E402

SECONDS = 1  # the corpus is what counts here; RUNS.md tells of the long runs
TORTURE = bool(os.environ.get("TEST_TORTURE"))
TORTURE_RUNS = int(float(os.environ.get("TEST_FUZZ_RUNS", "1e8")))


def ready(name):
    """The compiled target; skips where it cannot be."""
    if not shutil.which("clang"):
        skip("no clang (make deps)")
    target = campaign.Target(name, BUILD / "fuzz", quick=not TORTURE)
    trouble = target.compile()
    if "libclang_rt.fuzzer" in trouble and ("cannot find" in trouble or "no such file" in trouble.lower()):
        skip("this clang has no libFuzzer (make deps)")
    check(not trouble, trouble[-3000:])
    return target


def make_test(name):
    def run():
        if not turns.has_come(name):
            skip(turns.REASON)
        target = ready(name)
        check(target.corpus.is_dir() and any(target.corpus.iterdir()), f"corpus/{name} is empty: nothing to start from")
        target.failed.mkdir(parents=True, exist_ok=True)
        old = sh(target.program, target.options(), "-runs=0", target.corpus, timeout=120)
        check(old.returncode == 0, f"what was found once is back:\n{old.stdout[-3000:]}")
        before = target.counts()[0]
        trouble = target.piece(SECONDS, -1)
        check(not trouble, trouble[-3000:])
        check(target.counts()[0] > before, "the fuzzer executed nothing")

    run.__name__ = f"fuzz_{name}"
    test(run)


def torture():
    """Prints the executions and findings of each target as they grow."""
    targets = [ready(name) for name in campaign.targets()]
    forever = time.monotonic() + 1e9
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        clean = list(pool.map(lambda t: campaign.campaign(t, TORTURE_RUNS, forever, 60), targets))
    for target in targets:
        print(f"{target.name}: {target.counts()[0]:,} executions, {target.counts()[1]} findings")
    check(all(clean), "findings: " + ", ".join(t.name for t, good in zip(targets, clean) if not good))


for found in campaign.targets():
    make_test(found)
if TORTURE:
    torture.__name__ = f"fuzz_{TORTURE_RUNS:.0e}_executions_each"
    test(torture)


@test
def there_are_fuzz_targets():
    check(len(campaign.targets()) >= 14, "fuzz targets are missing")


@test
def every_target_is_in_the_record():
    """RUNS.md has a line for each, with the kind that the target says it is."""
    text = (campaign.FUZZ / "RUNS.md").read_text()
    for name in campaign.targets():
        kind = campaign.Target(name, BUILD / "fuzz").kind
        check(f"\n| {name} | {kind} | " in text, f"RUNS.md has no line for {name} as a {kind}")
        check(campaign.recorded(name)[0] > 0, f"RUNS.md tells no executions of {name}")


@test
def counts_go_on_from_the_record():
    """Without its file a target begins with what RUNS.md tells; with one, with the larger of both."""
    target = campaign.Target("frame", tempfile.mkdtemp(dir=BUILD))
    runs, findings = campaign.recorded("frame")
    check(runs > 0 and target.counts()[:2] == (runs, findings), f"{target.counts()}")
    target.add(5, 0, 1)
    check(target.counts()[0] == runs + 5, f"{target.counts()}")
    target.count_file.write_text("7 0 1\n")
    check(target.counts()[0] == runs, f"{target.counts()}")
    shutil.rmtree(target.build)


@test
def a_fuzzer_that_was_stopped_has_found_nothing():
    """By the clock an input took too long, but not when it is tried again. A crash is a crash."""
    target = ready("frame")
    target.failed.mkdir(parents=True, exist_ok=True)
    late = target.failed / "frame-timeout-0"
    late.write_bytes(b"quick")
    check(target.was_stopped(f"Test unit written to {late}\nERROR: libFuzzer: timeout after 10 seconds"), "not seen")
    check(not late.exists(), "an input that is none was kept")
    check(not target.was_stopped("Test unit written to build/fuzz/failed/frame-crash-0\n"), "a crash was forgiven")


@test
def the_cheap_mac_is_for_fuzzers_only():
    """SHA-256 is replaced under the fuzzers' macro; nothing else may define it."""
    hits = sh("grep -rlF FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION", [ROOT / p for p in ("Makefile", "src", "tools",
                                                                    "examples", "plugins", "bench")]).stdout.split()
    check([h for h in hits if not h.endswith("src/wire/sha256.h")] == [], f"{hits}")
    header = (ROOT / "ddl.h").read_text()
    check("define FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION" not in header, "ddl.h switches its own MACs off")


main()
